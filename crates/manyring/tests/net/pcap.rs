//! A capture of real frames, as a foreign tool reads it.

use crate::guest::{
    GUEST, GUEST_MAC, Guest, HOST, arp_request, echo_request, ethernet, halves, ipv4, is_ipv4,
};
use crate::space::{in_own_space, link, named, run};
use manyring_backend::net::Port;
use manyring_backend::net::tap::TapPort;
use manyring_serve::pcap::Pcap;
use std::sync::Arc;

const ICMP: u8 = 1;
const ECHOES: u16 = 200;

#[test]
fn a_foreign_tool_reads_every_frame_of_a_capture() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("frames.pcap");
    let bytes = std::sync::atomic::AtomicUsize::new(0);
    let others = std::sync::atomic::AtomicUsize::new(0);
    let count = |frame: &[u8]| {
        bytes.fetch_add(frame.len(), std::sync::atomic::Ordering::Relaxed);
        let is_echo = is_ipv4(frame, ICMP);
        others.fetch_add(usize::from(!is_echo), std::sync::atomic::Ordering::Relaxed);
        is_echo
    };
    in_own_space(|| {
        let port = Pcap::around(Arc::new(TapPort::open(named("mr0", 1)).unwrap()), &path).unwrap();
        assert_eq!((port.kind(), port.mtu()), ("tap", Some(1500)));
        run("ip addr add 10.77.0.1/24 dev mr0");
        run("ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:11 dev mr0 nud permanent");
        let host_mac = link("mr0").unwrap().address.unwrap();
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        for sequence in 0..ECHOES {
            let message = echo_request(sequence, usize::from(sequence) * 7);
            let frame = ethernet(host_mac, GUEST_MAC, 0x0800, &ipv4(GUEST, HOST, ICMP, &message));
            assert!(count(&frame));
            guest.send(&mut *tx, &frame);
            guest.recv(&mut *rx, count);
        }
        let announcement = arp_request(GUEST, HOST);
        port.transmit(&announcement).unwrap();
        assert!(!count(&announcement));
        assert_eq!(port.decorator.missed(), 0);
    });
    let path = path.to_str().unwrap();
    // Where echoes and their replies have wrong checksums, the tool says so.
    let filter = "-o ip.check_checksum:TRUE -T fields -e frame.len -e icmp.type -e icmp.seq";
    let text =
        run(&format!("tshark -r {path} {filter} -e icmp.checksum.status -e frame.time_epoch"));
    let rows: Vec<Vec<_>> = text.lines().map(|line| line.split('\t').collect()).collect();
    let sizes: usize = rows.iter().map(|row| row[0].parse::<usize>().unwrap()).sum();
    assert_eq!(sizes, bytes.into_inner());
    assert_eq!(rows.len(), usize::from(2 * ECHOES) + others.into_inner());
    for (kind, name) in [("8", "requests"), ("0", "replies")] {
        let sequences: Vec<u16> = rows
            .iter()
            .filter(|row| row[1] == kind && row[3] == "1")
            .map(|row| row[2].split(',').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(sequences, (0..ECHOES).collect::<Vec<_>>(), "{name}");
    }
    let times: Vec<f64> = rows.iter().map(|row| row[4].parse().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 1.7e9);
    let information = run(&format!("capinfos -t -E -l -M {path}"));
    for line in ["nsecpcap", "ether", "262144"] {
        assert!(information.contains(line), "{information}");
    }
}
