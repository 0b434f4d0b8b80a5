//! A daemon whose guests are in device processes, and the guests.

use super::pings::Pings;
use crate::cleanup::Folder;
use crate::command::{find, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, Kind, Net, fio, is_memory_on_disk};
use crate::net::{Far, Namespace, WORDS};
use crate::soak::Kills;
use crate::{Context, Outcome};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const IMAGE_MIB: u64 = 64;
const MTU: u32 = 1500;
/// How long anything of a guest or a daemon may take.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// fio writes blocks of random sizes in random order, reads them and compares; iperf3 sends and
/// receives; until the host says that it is enough.
const SCRIPT: &str = r#"
network $number
pings $HOST
load() {
    fio --name=load --filename=$DISK --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
        --bsrange=4k-64k --size=8m --randrepeat=0 --verify=crc32c --verify_fatal=1 --do_verify=1 \
        --output-format=terse --terse-version=3 > /tmp/fio 2>&1 || {
        cat /tmp/fio
        echo "fio" > /tmp/bad
        return 1
    }
    # The longest that a read and a write took.
    cut -d';' -f39,80 /tmp/fio | tr ';' '\n' | cut -d. -f1 >> /tmp/worst
    echo x >> /tmp/runs
}
worst() { sort -n /tmp/worst | tail -n 1; }
load || fail "wrong: $(cat /tmp/bad)"
mark calm $(worst)
rm /tmp/worst
(while [ ! -e /tmp/stop ]; do load || break; done) &
# A test has ended for its client before the server has read the last byte of it, which may have to
# be sent again. Until then the server is busy: it says so, and closes without having read what the
# client has sent, so that a reset may overtake its answer.
is_busy() { grep -q "the server is busy\|receive control message: Connection reset" /tmp/iperf3; }
(while [ ! -e /tmp/stop ]; do
    for way in "" -R; do
        tries=0
        until iperf3 -c $HOST -p 520$number -t 3 -b 100M $way > /tmp/iperf3 2>&1; do
            tries=$((tries + 1))
            is_busy && [ $tries -lt 10 ] && sleep 1 && continue
            cat /tmp/iperf3
            echo "iperf3 $way" > /tmp/bad
            break 3
        done
    done
done) &
await load
touch /tmp/stop
wait
[ -e /tmp/bad ] && fail "wrong: $(cat /tmp/bad)"
dmesg | grep -i "i/o error" && fail "the kernel saw an error"
pings $HOST
agrees $HOST 256 "in the end"
mark runs $(wc -l < /tmp/runs)
mark worst $(worst)
"#;

/// A guest with a disk and a network that one device process serves.
#[derive(Debug)]
pub(super) struct Tenant {
    /// The name of its domain.
    pub(super) name: &'static str,
    /// The last part of its address.
    number: u32,
    kind: Kind,
    guest: Option<Guest>,
    pings: Option<Pings>,
}

impl Tenant {
    fn new(kind: Kind) -> Self {
        let (name, number) = match kind {
            Kind::Uml => ("uml", 2),
            Kind::Qemu => ("qemu", 3),
        };
        Self { name, number, kind, guest: None, pings: None }
    }

    /// Its pings.
    ///
    /// # Errors
    /// It was not booted.
    pub(super) fn pings(&self) -> Outcome<&Pings> {
        self.pings.as_ref().ok_or_else(|| "the guest was not booted".to_owned())
    }

    /// Ends its load and the guest: how often fio compared all that it read, and how many
    /// microseconds the slowest request took before the kills and under them.
    ///
    /// # Errors
    /// The guest had an error.
    pub(super) fn finish(&mut self) -> Outcome<Report> {
        self.pings = None;
        let mut guest = self.guest.take().ok_or("the guest was not booted")?;
        guest.proceed()?;
        let said = guest.finish(Duration::from_secs(300))?;
        let number = |name: &str| {
            let start = format!("GUEST_MARK {name} ");
            let word = said.lines().find_map(|line| line.strip_prefix(&start));
            let number = word.and_then(|word| word.trim().parse().ok());
            number.ok_or_else(|| format!("the guest has not said {name}"))
        };
        let milliseconds = |name: &str| number(name).map(|micros: u64| micros.div_ceil(1000));
        Ok(Report {
            runs: number("runs")?,
            calm: milliseconds("calm")?,
            worst: milliseconds("worst")?,
        })
    }
}

/// The report of a guest's fio.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report {
    /// Runs that compared all that they read.
    pub(super) runs: u64,
    /// Milliseconds of the slowest request of a run before the kills.
    pub(super) calm: u64,
    /// Milliseconds of the slowest request of all runs after that.
    pub(super) worst: u64,
}

/// The files, the network and the guests.
#[derive(Debug)]
pub(super) struct Ground {
    folder: Folder,
    namespace: Namespace,
    _files: Folder,
    _far: Far,
    kills: Kills,
    /// The guests, each of its own device process.
    pub(super) tenants: Vec<Tenant>,
}

impl Ground {
    /// A bridge with the far end of the guests, and a configuration with a device process for each
    /// guest.
    pub(super) fn prepare(kills: &Kills, kinds: &[Kind]) -> Outcome<Self> {
        let (folder, files) = (Folder::new()?, Folder::inside(&kills.logs)?);
        let namespace = Namespace::new()?;
        namespace.bridge(MTU)?;
        let far = Far::start(&namespace, files.path())?;
        let tenants: Vec<_> = kinds.iter().copied().map(Tenant::new).collect();
        let ground =
            Self { folder, namespace, _files: files, _far: far, kills: kills.clone(), tenants };
        let mut text = format!("[daemon]\ncontrol = \"{}\"\n", ground.control().display());
        for Tenant { name, .. } in &ground.tenants {
            let image = ground._files.path().join(format!("{name}.img"));
            let file = File::create(&image).context(image.display())?;
            file.set_len(IMAGE_MIB << 20).context(image.display())?;
            let (disk, lan) = (ground.socket(name, "disk"), ground.socket(name, "lan"));
            let allowed = if is_memory_on_disk() { "memory_on_disk = true\n" } else { "" };
            text += &format!(
                "[[blk]]\nname = \"{name}-disk\"\nsocket_path = \"{}\"\nfile = \"{}\"\n\
                 format = \"raw\"\ndirect = true\nnum_queues = 2\ndomain = \"{name}\"\n{allowed}\
                 [[net]]\nname = \"{name}-lan\"\nsocket_path = \"{}\"\ntap = \"tap-{name}\"\n\
                 bridge = \"br0\"\ndomain = \"{name}\"\n{allowed}",
                disk.display(),
                image.display(),
                lan.display(),
            );
        }
        let config = ground.config();
        std::fs::write(&config, text).context(config.display())?;
        Ok(ground)
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("manyring.toml")
    }

    /// The daemon's control socket.
    pub(super) fn control(&self) -> PathBuf {
        self.folder.path().join("run-control.sock")
    }

    /// Where the daemon and the guests are with their network.
    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The folders of the sockets and of the images, for anybody; and the configuration of a daemon
    /// that has them at other paths.
    pub(super) fn elsewhere(&self, [sockets, images]: [&str; 2]) -> Outcome<([&Path; 2], String)> {
        let folders = [self.folder.path(), self._files.path()];
        let config = std::fs::read_to_string(self.config()).context("the configuration")?;
        let inside = |text: String, (host, path): (&Path, &str)| {
            text.replace(&host.display().to_string(), path)
        };
        let config = folders.into_iter().zip([sockets, images]).fold(config, inside);
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).context(path.display())
        };
        folders.iter().try_for_each(|folder| open(folder, 0o1777))?;
        for image in std::fs::read_dir(folders[1]).context("the images")?.flatten() {
            let path = image.path();
            if path.extension().is_some_and(|kind| kind == "img") {
                open(&path, 0o666)?;
            }
        }
        Ok((folders, config))
    }

    fn socket(&self, name: &str, device: &str) -> PathBuf {
        self.folder.path().join(format!("{name}-{device}.sock"))
    }

    /// How to start a daemon, with further arguments.
    pub(super) fn options(&self, more: &[&str]) -> DaemonOptions {
        let config = self.config().display().to_string();
        DaemonOptions {
            binary: self.kills.binary.clone(),
            folder: self.folder.path().to_owned(),
            log: self.kills.logs.join("manyring.log"),
            arguments: ["run", "--config", &config]
                .iter()
                .chain(more)
                .map(|&word| word.to_owned())
                .collect(),
            is_controlled: false,
            wrapper: self.namespace.wrapper(),
        }
    }

    /// Starts a daemon, and waits until all of its sockets are there.
    pub(super) fn serve(&self) -> Outcome<Daemon> {
        let of =
            |tenant: &Tenant| [self.socket(tenant.name, "disk"), self.socket(tenant.name, "lan")];
        let sockets: Vec<_> = self.tenants.iter().flat_map(of).collect();
        let last = sockets.last().ok_or("no guest")?;
        let daemon = Daemon::start(self.options(&[]), last)?;
        wait_for("the daemon's sockets", LIMIT, || {
            Ok(sockets.iter().all(|socket| socket.exists()).then_some(()))
        })?;
        Ok(daemon)
    }

    /// Boots the guests. Returns when the load of each runs and it answers pings.
    pub(super) fn boot(&mut self) -> Outcome {
        let root = self.folder.path().join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        for index in 0..self.tenants.len() {
            let Tenant { name, number, kind, .. } = self.tenants[index];
            let (disk, lan) = (self.socket(name, "disk"), self.socket(name, "lan"));
            let options = GuestOptions {
                socket: Some(&disk),
                net: Some(Net { socket: &lan, pairs: 1 }),
                queues: 2,
                is_packed: self.kills.is_packed,
                cpus: 2,
                programs: &["fio", "iperf3"],
                root: Some(&root),
                script: &format!("number={number}\n{WORDS}{SCRIPT}"),
                ..GuestOptions::default()
            };
            let console = self.kills.logs.join(format!("{name}.log"));
            let mut guest = Guest::boot(&Kernel::prepare(kind)?, &options, &console)?;
            guest.reach("load", LIMIT)?;
            self.tenants[index].guest = Some(guest);
            let address = format!("192.0.2.{number}");
            self.tenants[index].pings = Some(Pings::start(&self.namespace, &address)?);
        }
        Ok(())
    }
}
