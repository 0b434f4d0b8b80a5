//! The daemon: what `blk`, `net`, `xen-blk` and `run` do until a signal comes.
//!
//! A plan (`manyring_config`) is put together and served by `manyring_supervisor`;
//! `manyring_control` takes changes of it and shows what it does. [`serve`] is the whole daemon.

use manyring_config::Plan;
use manyring_control as control;
use manyring_control::state;
use manyring_serve::output::Failure;
use manyring_serve::times::{NAMES_END, WORKERS_END};
use manyring_serve::{assemble, fds, log, service, signals};
use manyring_supervisor::{devices, model, processes};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};

/// The runtime of the program: one thread.
///
/// # Errors
/// The system's, in one line.
pub(crate) fn runtime() -> Result<Runtime, String> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))
}

/// Does what signals ask for, for ever: reads the configuration, or starts who takes over.
async fn obey_signals(
    asks: Option<[tokio::signal::unix::Signal; 2]>,
    state: state::State,
    service: &service::Service,
    control: Option<&Path>,
) {
    let Some([mut reload, mut next]) = asks else {
        return std::future::pending().await;
    };
    loop {
        tokio::select! {
            Some(()) = reload.recv() => {}
            Some(()) = next.recv() => {
                let ended = match control {
                    Some(control) => processes::start_next(control).await,
                    None => "this daemon has no control socket".to_owned(),
                };
                tracing::warn!(ended, "takeover by the next process failed");
                service.status(&format!("takeover failed: {ended}"));
                continue;
            }
            else => return std::future::pending().await,
        }
        let who = model::Who { comm: "SIGHUP".to_owned(), ..model::Who::default() };
        service.reloading();
        match control::reload(&state, who, false).await {
            Ok(done) => {
                let steps = done.steps.len();
                tracing::info!(generation = done.generation, steps, "configuration reloaded");
                service.ready(&state.devices.in_words());
            }
            Err(error) => {
                tracing::error!(
                    %error,
                    "reloading the configuration failed; the running one stays in effect"
                );
                service.ready(&format!("reloading the configuration failed: {error}"));
            }
        }
        // What the plan took beside the one that is carried out.
        let _ = manyring_engine::aside(manyring_backend::sys::heap::give_back).await;
    }
}

/// Opens all that the plan names, and what another process leaves to this one. That process waits,
/// unless it has died.
async fn open(
    plan: &Plan,
    service: &Arc<service::Service>,
    takeover: Option<PathBuf>,
) -> Result<(devices::DeviceManager, Option<processes::Before>), String> {
    let pool = devices::pool(plan);
    let mut handoff = match takeover {
        Some(control) => {
            // From when it asks guests wait: the first worker begins before.
            let _ = pool.has_ring();
            processes::Handoff::of(&control, devices::process_arguments(&plan.daemon)).await?
        }
        None => processes::Handoff::default(),
    };
    service.hand_in(std::mem::take(&mut handoff.sockets)).await;
    let (mut before, is_last) = (handoff.take_before(), handoff.is_last.clone());
    let manager = devices::DeviceManager::new(plan, pool, service.clone(), handoff);
    let manager = processes::Handoff::while_it_waits(&mut before, &is_last, manager).await;
    let manager = manager.map_err(|error| error.to_string())?;
    if service.is_managed() && is_last.load(Ordering::Relaxed) {
        // It ends every process that is left of the service, and starts the service anew.
        return Err(
            "--takeover: the running daemon died; the service manager starts the next".into()
        );
    }
    Ok((manager, before))
}

/// Has all that is served stop when a signal comes.
async fn stops(ends: &mut signals::Ends, service: &service::Service, stop: &watch::Sender<bool>) {
    let signal = ends.next().await;
    tracing::info!(signal, "stopping");
    service.stopping();
    stop.send_replace(true);
    std::future::pending::<()>().await;
}

/// Opens and closes what a plan names, and tells what guests of it are not apart.
///
/// # Errors
/// The first that cannot be served, in one line.
pub(crate) fn look(plan: &Plan) -> Result<(), String> {
    assemble::look(plan).map_err(|error| error.to_string())
}

/// From where a daemon with a configuration file starts.
#[derive(Debug)]
pub(crate) struct RunFrom {
    /// The configuration file.
    pub(crate) config: PathBuf,
    /// The control socket of the daemon that is taken over.
    pub(crate) takeover: Option<PathBuf>,
}

/// Puts the parts together and serves until a signal comes.
///
/// # Errors
/// [`Failure::Refused`], one line: what cannot be opened, or why serving ended.
pub(crate) fn serve(plan: &Plan, run: Option<RunFrom>) -> Result<(), Failure> {
    // Before another process hands its file descriptors over.
    fds::raise_limit();
    let runtime = runtime()?;
    let (file, takeover) = run.map(|run| (run.config, run.takeover)).unzip();
    let served = runtime.block_on(async {
        let asks = signals::outlive(file.is_some())?;
        // A disk may take long to open: SIGTERM still ends us at once.
        let service = service::Service::from_environment(&plan.named_fds());
        let (mut manager, before) = open(plan, &service, takeover.flatten()).await?;
        // From here on guests come. Disks have been tried with the daemon's own memory only.
        manyring_memory::guard_memory();
        // From here on a signal ends us in good order only: it removes the sockets made below.
        let mut ends = signals::Ends::new()?;
        // All lines up to here are in the log before a socket shows that we serve.
        log::finish();
        let control = control::bind(&plan.daemon, &service).await?;
        let scraped = control::bind_metrics(&plan.daemon, before.is_some())?;
        // The last step that can fail: another process has ended by then.
        processes::Handoff::accept(before).await?;
        service.is_main().await;
        log::now_serves();
        let (stop_sender, stop) = watch::channel(false);
        let signals = stops(&mut ends, &service, &stop_sender);
        let state = state::State {
            pool: manager.pool().clone(),
            devices: manager.devices().clone(),
            changes: manager.changes().clone(),
            processes: manager.processes().clone(),
            service: service.clone(),
            shown: manager.shown(),
            file,
            reads: Arc::default(),
            bodies: Arc::default(),
        };
        let asked = obey_signals(asks, state.clone(), &service, plan.daemon.control.as_deref());
        let pool = manager.pool().clone();
        let fed = service::feed(&service, &pool);
        let (begun, devices) = (manager.begun(), manager.devices().clone());
        let (listens, listened) = oneshot::channel::<()>();
        let (names, mut named) = mpsc::channel::<()>(1);
        let ready = async {
            begun.await;
            drop(listens);
            while named.recv().await.is_some() {}
            service.ready(&devices.in_words());
            std::future::pending::<()>().await;
        };
        let controlled = control::serve(control, state.clone(), &service, (listened, names));
        let served = tokio::select! {
            served = manager.serve(&stop) => served,
            () = control::serve_metrics(scraped, state) => Ok(()),
            () = controlled => Ok(()),
            () = signals => Ok(()),
            () = asked => Ok(()),
            () = ready => Ok(()),
            () = fed => Ok(()),
        };
        end_workers(pool).await;
        close(manager.devices().take()).await;
        served.map_err(|error| error.to_string())
    });
    // A task that waits for a host call must not keep us either.
    runtime.shutdown_background();
    for path in manyring_transport::vhost_user::names_left(NAMES_END) {
        let path = path.display();
        tracing::warn!("unlinking {path} timed out; exiting and leaving it behind");
    }
    served.map_err(Failure::Refused)
}

/// Ends the workers. One that hangs in a host call is not waited for, and its device is named.
async fn end_workers(pool: Arc<manyring_engine::Pool>) {
    let quit = manyring_engine::aside(move || pool.quit());
    if tokio::time::timeout(WORKERS_END, quit).await.is_err() {
        let problem = "a worker is blocked in a host call; exiting";
        tracing::warn!(devices = held_devices(), "{problem}");
    }
}

/// Closes devices. With a disk in memory its memory is unmapped, which may take long.
async fn close(devices: Vec<model::Entry>) {
    let closed = manyring_engine::aside(move || drop(devices));
    let _ = tokio::time::timeout(WORKERS_END, closed).await;
}

/// The devices that threads serve which do not come back from a host call.
fn held_devices() -> String {
    let held = manyring_engine::held().into_iter().map(|held| held.device);
    held.collect::<Vec<_>>().join(", ")
}
