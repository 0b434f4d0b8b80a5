//! A daemon whose page faults wait: the program in a process of its own, in which a second thread
//! keeps the pages of a file from whoever touches them (userfaultfd). So a test decides how long a
//! page fault takes, as a front-end can that punches a hole into its file. Needs root.

use crate::support::process::Daemon;
use manyring_driver::hostile::Withheld;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

/// Set in the process that is the daemon: the folder of its configuration and its sockets.
const FOLDER: &str = "MANYRING_TEST_FAULTS_FOLDER";
/// The socket by which the test says which file is withheld.
const SOCKET: &str = "faults";

/// Not a test by itself: the process that [`daemon`] starts.
#[test]
fn daemon_whose_page_faults_wait() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let listener = UnixListener::bind(Path::new(&folder).join(SOCKET)).unwrap();
    let listen = move || listener.incoming().for_each(|stream| withhold(stream.unwrap()));
    let _ = std::thread::Builder::new().name("faults".to_owned()).spawn(listen).unwrap();
    let file = format!("{folder}/manyring.toml");
    let arguments = ["manyring", "run", "--config", &file].map(Into::into);
    let _ = manyring::run(arguments.into());
}

/// Serves a connection: a line with the name of a memfd, whose pages are withheld until the other
/// end is closed. The answers say that they are, and that a thread waits for one.
fn withhold(mut stream: UnixStream) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(name)) = lines.next() else { return };
    let withheld = Withheld::of_memfd(&name).unwrap();
    let _ = stream.write_all(b"withheld\n");
    if withheld.wait_until_touched().is_ok() {
        let _ = stream.write_all(b"touched\n");
    }
    let _ = lines.next();
}

/// Starts such a daemon with this configuration, in which `@` stands for the folder of the sockets.
pub(crate) fn daemon(configuration: &str, names: &[&str]) -> Daemon {
    daemon_told(configuration, names, &[])
}

/// Starts such a daemon with this configuration, with `environment` added to its own.
pub(crate) fn daemon_told(
    configuration: &str,
    names: &[&str],
    environment: &[(&str, &str)],
) -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    // It serves all devices itself: its device processes would be processes of this program of
    // tests.
    let text = configuration.replacen("[daemon]\n", "[daemon]\ndomains = 'one'\n", 1);
    let text = text.replace('@', &folder.path().display().to_string());
    std::fs::write(folder.path().join("manyring.toml"), text).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "faults::daemon_whose_page_faults_wait", "--nocapture"]);
    command.env(FOLDER, folder.path()).stdout(std::process::Stdio::null());
    command.envs(environment.iter().copied());
    let sockets: Vec<_> = names.iter().map(|name| folder.path().join(name)).collect();
    Daemon::start(command, folder, &sockets)
}

/// Pages that are withheld from the daemon until this is dropped.
pub(crate) struct Hole(BufReader<UnixStream>);

impl Hole {
    /// Withholds the missing pages of the memfd `name`, which the daemon has mapped.
    pub(crate) fn new(daemon: &Daemon, name: &str) -> Self {
        let mut stream = UnixStream::connect(daemon.folder().join(SOCKET)).unwrap();
        writeln!(stream, "{name}").unwrap();
        let mut hole = Self(BufReader::new(stream));
        assert_eq!(hole.line(), "withheld");
        hole
    }

    /// Returns when a thread of the daemon waits for a page.
    pub(crate) fn wait_until_touched(&mut self) {
        assert_eq!(self.line(), "touched");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Hole {
    fn drop(&mut self) {
        let _ = self.0.get_ref().shutdown(std::net::Shutdown::Both);
    }
}
