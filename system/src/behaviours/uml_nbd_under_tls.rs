//! A disk whose server speaks TLS alone, and is killed under a guest that compares what it reads.
//! Who has no certificate of the right authority, or finds a server that is another, is told so.

use super::{Behaviour, Scene};
use crate::command::{child, wait_for};
use crate::guest::Kind;
use crate::nbd::{Engine, Place, Server, Trial, Turns};
use crate::{Context, Outcome, certificates, check};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_nbd_under_tls", run };

fn run(scene: &Scene<'_>) -> Outcome {
    let mut turns = Turns::start(&Engine::ALL, scene.folder.path(), &scene.logs, true)?;
    let trial = Trial {
        binary: &scene.stage.binary,
        folder: scene.folder.path(),
        logs: &scene.logs,
        kernel: scene.kernel(Kind::Uml)?,
        queues: 1,
        kills: 2,
        pause: &mut || Duration::from_millis(500),
    };
    trial.run(&mut turns)?;
    drop(turns);
    Engine::ALL.into_iter().try_for_each(|engine| strangers(scene, engine))
}

/// Clients that the server does not trust, and servers that the client does not.
fn strangers(scene: &Scene<'_>, engine: Engine) -> Outcome {
    let folder = scene.folder.path();
    let [right, other, nobody] = ["right", "other", "nobody"].map(|name| folder.join(name));
    for path in [&right, &other, &nobody] {
        std::fs::create_dir_all(path).context(path.display())?;
    }
    let place = Place::new(&right, true)?;
    let own = place.certificates.clone().ok_or("the place has certificates")?;
    certificates::write(&other)?;
    let authority = nobody.join("ca-cert.pem");
    std::fs::copy(own.join("ca-cert.pem"), &authority).context(authority.display())?;
    let server = Server::start(engine, &place, &scene.log("strangers.log"))?;
    let uri = |folder: &Path, host: &str| {
        let (socket, folder) = (place.socket.display(), folder.display());
        format!("nbds+unix:///?socket={socket}&tls-certificates={folder}&tls-hostname={host}")
    };
    let plain = Place { certificates: None, ..place.clone() };
    let host = certificates::HOST;
    for (uri, expected) in [
        (uri(&other, host), "has a certificate that no authority in ca-cert.pem has signed"),
        (uri(&own, "nas.example"), "has a certificate for storage.example, and not for \"nas"),
        (uri(&nobody, host), "it may want a certificate that it trusts"),
        (plain.uri(), "serves this export under TLS only (nbds://)"),
        (uri(&folder.join("none"), host), "none/ca-cert.pem cannot be used: No such file"),
    ] {
        said(scene, &uri, expected)?;
    }
    drop(server);
    Ok(())
}

/// Starts the daemon for this disk, and looks for `expected` in what it says first.
fn said(scene: &Scene<'_>, uri: &str, expected: &str) -> Outcome {
    let (log, socket) = (scene.file("stranger.txt"), scene.file("stranger.sock"));
    let file = std::fs::File::create(&log).context(log.display())?;
    let mut command = child(&scene.stage.binary);
    command.args(["blk", "--nbd", uri, "--socket-path"]).arg(socket);
    let out = file.try_clone().context(log.display())?;
    command.stdin(Stdio::null()).stdout(out).stderr(file);
    let mut daemon = command.spawn().context("the daemon")?;
    let found = wait_for("the daemon's first line", Duration::from_secs(30), || {
        let text = std::fs::read_to_string(&log).context(log.display())?;
        Ok(text.split_once('\n').map(|(line, _)| line.to_owned()))
    });
    let _ = daemon.kill();
    daemon.wait().context("the daemon")?;
    let line = found?;
    check(line.contains(expected), || format!("{uri}: expected {expected:?}, was told {line:?}"))
}
