//! Where workers run and what they serve, as the operator chose it.

use crate::support::process::Daemon;
use crate::support::program::shown;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use manyring_engine::allowed_cpus;

#[test]
fn queues_are_served_by_the_workers_that_were_chosen_on_their_cpus() {
    let cpu = *allowed_cpus().last().unwrap();
    let config = format!(
        "[daemon]\ncontrol = '@/control'\nworkers = 3\ndomains = 'one'\n\
         worker_cpus = ['{cpu}', '{cpu}', '{cpu}']\n\
         [[blk]]\nname = 'disk'\nsocket_path = '@/disk'\nmemory = '16M'\nnum_queues = 3\n\
         queue_workers = [2, 0]\n"
    );
    let daemon = Daemon::run(&config, &["disk", "control"]);
    let options = BlkDriverOptions { queues: 3, ..BlkDriverOptions::default() };
    let mut guest = BlkDriver::connect(&daemon.socket_of("disk"), &options).unwrap();
    for queue in &mut guest.queues {
        queue.read(0, &mut [0; 4096]).unwrap();
    }
    let control = daemon.socket_of("control");
    let device = shown(&control, "/v1/devices/disk");
    let workers: Vec<_> = (0..3).map(|n| &device["queues"][n]["counters"]["worker"]).collect();
    assert_eq!(workers, [2, 0, 0]);
    let workers = shown(&control, "/v1/workers");
    let seen: Vec<_> = workers["workers"].as_array().unwrap().iter().collect();
    let of = |n: usize| (seen[n]["index"].as_u64(), seen[n]["queues"].as_u64());
    assert_eq!((of(0), of(1), seen.len()), ((Some(0), Some(2)), (Some(2), Some(1)), 2));
    assert!(seen.iter().all(|worker| worker["cpus"] == serde_json::json!([cpu])));
    let processes = daemon.processes().into_iter();
    let tasks = processes.map(|process| std::fs::read_dir(format!("/proc/{process}/task")));
    let mut bound = 0;
    for task in tasks.flat_map(Result::unwrap) {
        // The thread of a connection to `control` may end while it is looked at.
        let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        if status.starts_with("Name:\tworker-") {
            assert!(status.contains(&format!("Cpus_allowed_list:\t{cpu}\n")), "{status}");
            bound += 1;
        }
    }
    assert_eq!(bound, 2);
}
