//! The stage of the soak: eight devices of one daemon, disks on files, taps in a namespace.
//!
//! Three images lie beside the logs, on a file system of the host's disk: io_uring serves them. One
//! hostile guest has its image on a tmpfs with too little room: plain system calls serve it.

use super::Options;
use super::guest::{self, Role};
use crate::cleanup::Folder;
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::net::Namespace;
use crate::{Context, Outcome};
use manyring_driver::{BlkDriver, BlkDriverOptions, NetDriver, NetDriverOptions};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The roles of the guests, by their numbers.
pub(super) const ROLES: [Role; 8] = [
    Role::Blk,
    Role::Blk,
    Role::Net,
    Role::Net,
    Role::HostileBlk,
    Role::HostileBlk,
    Role::HostileNet,
    Role::HostileNet,
];

/// Device process for the image on tmpfs: less than the disk, so that the host's space runs out.
const ROOM: u64 = 160 << 20;
const START: Duration = Duration::from_secs(30);

/// The daemon and what it stands on; dropped, all of it is gone.
#[derive(Debug)]
pub(super) struct Stage {
    // In this order they end: the daemon before its namespace, its files last.
    daemon: Daemon,
    namespace: Namespace,
    pub(super) logs: PathBuf,
    /// Sockets and the tmpfs.
    folder: Folder,
    images: Folder,
}

impl Stage {
    /// Makes files and namespace, and starts the daemon with eight devices.
    pub(super) fn new(options: &Options) -> Outcome<Self> {
        let folder = Folder::new()?;
        let images = Folder::inside(&options.logs)?;
        let namespace = Namespace::new()?;
        let image = |index| image(folder.path(), images.path(), index);
        make_images(&namespace, folder.path(), &image)?;
        let path = folder.path().join("manyring.toml");
        std::fs::write(&path, config(folder.path(), &image)).context(path.display())?;
        let arguments = ["run", "--config"].map(str::to_owned).into_iter();
        let daemon = DaemonOptions {
            binary: options.binary.clone(),
            folder: folder.path().to_owned(),
            log: options.logs.join("manyring.log"),
            arguments: arguments.chain([path.display().to_string()]).collect(),
            is_controlled: false,
            wrapper: namespace.wrapper(),
        };
        let daemon = Daemon::start(daemon, &socket(folder.path(), 0))?;
        let logs = options.logs.clone();
        let stage = Self { daemon, namespace, logs, folder, images };
        wait_for("all sockets", START, || {
            Ok((0..ROLES.len()).all(|index| stage.socket(index).exists()).then_some(()))
        })?;
        stage.lay_cables()?;
        Ok(stage)
    }

    /// Gives the host's ends of the taps their addresses, and nothing more to talk about.
    fn lay_cables(&self) -> Outcome {
        for number in numbers(|role| matches!(role, Role::Net | Role::HostileNet)) {
            let tap = format!("tap{number}");
            let (far, near) = (guest::far_address(number), guest::address(number));
            let (far_mac, mac) = (hex(guest::far_mac(number)), hex(guest::mac(number)));
            for words in [
                format!("ip link set {tap} down"),
                format!("ip link set {tap} address {far_mac} addrgenmode none up"),
                format!("ip address add {far}/24 dev {tap}"),
                format!("ip neighbour replace {near} lladdr {mac} dev {tap} nud permanent"),
            ] {
                self.namespace.run(&words)?;
            }
        }
        Ok(())
    }

    /// The socket of device `index`.
    pub(super) fn socket(&self, index: usize) -> PathBuf {
        socket(self.folder.path(), index)
    }

    /// The image of device `index`, as processes in the namespace see it.
    pub(super) fn image(&self, index: usize) -> PathBuf {
        image(self.folder.path(), self.images.path(), index)
    }

    pub(super) fn daemon_pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// This program, as a guest in the namespace. It ends with us.
    pub(super) fn guest(&self, orders: &guest::Orders) -> Outcome<Command> {
        let program = std::env::current_exe().context("this program")?;
        let mut command = self.namespace.child(&program.display().to_string());
        command.arg("soak-guest").args(orders.words()).stdin(Stdio::piped());
        Ok(command)
    }

    /// Fails if the daemon has ended.
    pub(super) fn check_running(&mut self) -> Outcome {
        let Some(status) = self.daemon.ended()? else { return Ok(()) };
        let log = self.daemon.log()?;
        let last: Vec<_> = log.lines().rev().take(5).collect();
        Err(format!("the daemon ended: {status}; its log from the end: {}", last.join(" | ")))
    }

    /// A new guest on each socket: its session comes up, and a request comes back. It connects
    /// once: a device that rests after a front-end whose call blocked makes it wait, and skips
    /// clients that were killed in this time.
    pub(super) fn serve_everybody(&mut self) -> Outcome {
        for (index, role) in ROLES.iter().enumerate() {
            serve(&self.socket(index), *role).context(format!("device {index}"))?;
        }
        Ok(())
    }

    /// The daemon ends when it is asked to.
    pub(super) fn stop(self) -> Outcome {
        self.daemon.stop()
    }
}

fn serve(socket: &Path, role: Role) -> Outcome {
    let max_wait = Duration::from_secs(30);
    match role {
        Role::Blk | Role::HostileBlk => {
            let options = BlkDriverOptions { max_wait, ..BlkDriverOptions::default() };
            let mut driver = BlkDriver::connect(socket, &options).context("the session")?;
            let mut bytes = [0; 4096];
            driver.queues[0].read(0, &mut bytes).context("a read")?;
            driver.queues[0].flush().context("a flush")
        }
        Role::Net | Role::HostileNet => {
            let options =
                NetDriverOptions { max_wait, transmit_size: 2048, ..NetDriverOptions::default() };
            let mut driver = NetDriver::connect(socket, &options).context("the session")?;
            let tx = &mut driver.pairs[0].tx;
            // To everybody, of the type for local experiments: the host drops it.
            let head = [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
            let header = manyring_driver::wire::net::RawNetHeader::default();
            tx.send(&header, &[&head[..], &[0; 50]].concat()).context("a frame")?;
            tx.publish(0).context("a kick")?;
            wait_for("a frame's end", max_wait, || Ok((tx.reclaim() == 1).then_some(())))
        }
    }
}

/// The numbers of the guests that are so.
pub(super) fn numbers(is: impl Fn(Role) -> bool) -> impl Iterator<Item = u8> {
    (0..).zip(ROLES).filter(move |(_, role)| is(*role)).map(|(number, _)| number)
}

fn make_images(namespace: &Namespace, folder: &Path, image: &dyn Fn(usize) -> PathBuf) -> Outcome {
    let small = small_room(folder);
    std::fs::create_dir(&small).context(small.display())?;
    namespace.run(&format!("mount -t tmpfs -o size={ROOM} soak {}", small.display()))?;
    for (index, role) in ROLES.iter().enumerate() {
        let size = match role {
            Role::Blk => guest::DISK_SIZE,
            Role::HostileBlk => guest::HOSTILE_DISK_SIZE,
            _ => continue,
        };
        namespace.run(&format!("truncate --size {size} {}", image(index).display()))?;
    }
    Ok(())
}

fn small_room(folder: &Path) -> PathBuf {
    folder.join("small")
}

fn socket(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("{index}.sock"))
}

fn image(folder: &Path, images: &Path, index: usize) -> PathBuf {
    let is_small = ROLES.iter().position(|role| *role == Role::HostileBlk) == Some(index);
    let room = if is_small { small_room(folder) } else { images.to_owned() };
    room.join(format!("{index}.img"))
}

/// Whether the disk of guest `number` passes the page cache of the host by.
pub(super) fn is_direct(number: u8) -> bool {
    number % 2 == 1
}

/// The daemon's configuration: every second disk passes the page cache by, one tap has little room.
fn config(folder: &Path, image: &dyn Fn(usize) -> PathBuf) -> String {
    // One process has all that the guests leave behind.
    let mut text = "[daemon]\ndomains = 'one'\n".to_owned();
    for (index, role) in ROLES.iter().enumerate() {
        let number = u8::try_from(index).unwrap_or(0);
        let socket = socket(folder, index);
        let socket = socket.display();
        let _ = match role {
            Role::Blk | Role::HostileBlk => {
                let image = image(index);
                let (image, is_direct) = (image.display(), is_direct(number));
                let queues = guest::QUEUES;
                write!(
                    text,
                    "[[blk]]\nname = 'disk{index}'\nsocket_path = '{socket}'\nfile = '{image}'\n\
                     direct = {is_direct}\nnum_queues = {queues}\nhandshake_timeout = 1\n\n"
                )
            }
            Role::Net | Role::HostileNet => {
                let (mac, pairs) = (hex(guest::mac(number)), guest::PAIRS);
                let sndbuf = if index % 2 == 1 { "sndbuf = 16384\n" } else { "" };
                write!(
                    text,
                    "[[net]]\nname = 'net{index}'\nsocket_path = '{socket}'\n\
                     tap = 'tap{index}'\nqueue_pairs = {pairs}\nmac = '{mac}'\n{sndbuf}\
                     handshake_timeout = 1\n\n"
                )
            }
        };
    }
    text
}

fn hex(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_eight_devices_and_each_kind_behaves_and_does_not() {
        let (folder, images) = (Path::new("/f"), Path::new("/i"));
        let text = config(folder, &|index| image(folder, images, index));
        assert_eq!(text.matches("[[blk]]").count(), 4);
        assert_eq!(text.matches("[[net]]").count(), 4);
        assert!(text.contains("file = '/i/0.img'") && text.contains("'/f/small/4.img'"));
        assert!(text.contains("mac = '02:00:00:77:00:03'"));
        assert_eq!(numbers(|role| role == Role::HostileNet).collect::<Vec<_>>(), [6, 7]);
    }
}
