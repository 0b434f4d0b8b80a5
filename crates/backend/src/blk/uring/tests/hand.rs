//! Who makes a transfer: the worker, or a thread of the kernel that a lane counts.

use super::*;

#[test]
fn a_request_that_a_block_device_makes_wait_is_counted_by_a_lane() {
    let file = image();
    let (narrow, wide) = (Hand::Kernel(Width::Narrow), Hand::Kernel(Width::Wide));
    let write = Op::Write { durable: false };
    for (direct, op, hands) in [
        (true, write, [Hand::OwnAtOnce, wide]),
        (true, Op::Read, [Hand::OwnAtOnce, wide]),
        (false, write, [narrow, narrow]),
        (false, Op::Read, [Hand::Own, narrow]),
    ] {
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let image = Image::open(file.path(), options).unwrap().taken_for_block_device();
        let mut queue = UringDisk::new(image).unwrap().queue(false).unwrap();
        let mut ring = Ring::new().unwrap();
        queue.attach(Some(&mut ring), 0);
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let slices = SliceList::of_mapping(&memory, &[(0, 4096)]).unwrap();
        let mut burst = Burst::default();
        burst.slices().extend(slices.all());
        burst.push(0, op, 0, 4096);
        let disk = ring.open_disk(queue.number, queue.image.device());
        let (request, pieces) = burst.iter().next().unwrap();
        queue.remember(request, pieces);
        let first = queue.hand(0, disk, &mut ring);
        assert!(matches!(queue.in_flight[0].failed(Errno::AGAIN), Step::Again));
        let again = queue.hand(0, disk, &mut ring);
        assert_eq!([first, again], hands, "direct {direct}, {op:?}");
    }
}
