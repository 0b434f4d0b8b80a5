//! The daemon: the commands `blk`, `net`, `xen-blk` and `run`, which serve until a signal ends
//! them.
//!
//! `manyring_supervisor` opens and serves the devices of a plan (`manyring_config`);
//! `manyring_control` accepts changes over the control socket and shows devices and counters.
//! [`serve`] is the whole daemon.

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

/// Builds the program's tokio runtime, which has one thread: the control thread.
///
/// # Errors
/// One line with the error of the operating system.
pub(crate) fn runtime() -> Result<Runtime, String> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))
}

/// Handles two signals, for ever: SIGHUP (reads the configuration file again) and SIGUSR2 (starts
/// the daemon that takes over from this one). `asks` has both, in this order; `None`: there is no
/// configuration file.
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
        // Parsing takes far more memory than the plan itself: return the free memory to the host.
        let _ = manyring_engine::aside(manyring_backend::sys::heap::give_back).await;
    }
}

/// Opens the devices of the plan. With `takeover`, first gets sockets, images and sessions from the
/// daemon at that control socket. That daemon waits until [`processes::Handoff::accept`], unless it
/// has died.
async fn open(
    plan: &Plan,
    service: &Arc<service::Service>,
    takeover: Option<PathBuf>,
) -> Result<(devices::DeviceManager, Option<processes::Before>), String> {
    let pool = devices::pool(plan);
    let mut handoff = match takeover {
        Some(control) => {
            // `has_ring` starts the first worker and its io_uring, which is slow. Guests pause from
            // the takeover request on, so do this before that request.
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
        // The service manager will kill all processes of the service, also this one, and start the
        // service again.
        return Err(
            "--takeover: the running daemon died; the service manager starts the next".into()
        );
    }
    Ok((manager, before))
}

/// Waits for a signal that ends the daemon, then tells the device manager to stop. Never returns:
/// the caller's `select` waits for the device manager's end.
async fn stops(ends: &mut signals::Ends, service: &service::Service, stop: &watch::Sender<bool>) {
    let signal = ends.next().await;
    tracing::info!(signal, "stopping");
    service.stopping();
    stop.send_replace(true);
    std::future::pending::<()>().await;
}

/// Checks a plan against this host, by opening and closing its disks and interfaces.
///
/// # Errors
/// One line for the first device that cannot be served.
pub(crate) fn look(plan: &Plan) -> Result<(), String> {
    assemble::look(plan).map_err(|error| error.to_string())
}

/// The options of `manyring run`.
#[derive(Debug)]
pub(crate) struct RunFrom {
    /// The configuration file.
    pub(crate) config: PathBuf,
    /// The control socket of the daemon from which this one takes over.
    pub(crate) takeover: Option<PathBuf>,
}

/// Serves the plan until a signal ends the daemon.
///
/// # Errors
/// [`Failure::Refused`]: one line that says what cannot be opened, or why serving ended.
pub(crate) fn serve(plan: &Plan, run: Option<RunFrom>) -> Result<(), Failure> {
    // Raise the limit first: a takeover receives many file descriptors.
    fds::raise_limit();
    let runtime = runtime()?;
    let (file, takeover) = run.map(|run| (run.config, run.takeover)).unzip();
    let served = runtime.block_on(async {
        let asks = signals::outlive(file.is_some())?;
        // Opening disks may block: until that is done, the default action of SIGTERM applies.
        let service = service::Service::from_environment(&plan.named_fds());
        let (mut manager, before) = open(plan, &service, takeover.flatten()).await?;
        // Catch SIGBUS from here on: guests may truncate memory that this process uses.
        manyring_memory::guard_memory();
        // From here on signals are handled, so that the sockets created below are unlinked.
        let mut ends = signals::Ends::new()?;
        // Write the log before the control socket exists: a script may wait for that, then read.
        log::finish();
        let control = control::bind(&plan.daemon, &service).await?;
        let scraped = control::bind_metrics(&plan.daemon, before.is_some())?;
        // In this step the previous daemon ends: so all steps that can fail come before.
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
    // Do not wait for tasks that are blocked in a system call.
    runtime.shutdown_background();
    for path in manyring_transport::vhost_user::names_left(NAMES_END) {
        let path = path.display();
        tracing::warn!("unlinking {path} timed out; exiting and leaving it behind");
    }
    served.map_err(Failure::Refused)
}

/// Ends the workers. If a worker is blocked in a system call for [`WORKERS_END`], logs its device
/// and does not wait for the worker.
async fn end_workers(pool: Arc<manyring_engine::Pool>) {
    let quit = manyring_engine::aside(move || pool.quit());
    if tokio::time::timeout(WORKERS_END, quit).await.is_err() {
        let problem = "a worker is blocked in a host call; exiting";
        tracing::warn!(devices = held_devices(), "{problem}");
    }
}

/// Closes devices. Stops waiting after [`WORKERS_END`]: unmapping a disk in memory may take longer.
async fn close(devices: Vec<model::Entry>) {
    let closed = manyring_engine::aside(move || drop(devices));
    let _ = tokio::time::timeout(WORKERS_END, closed).await;
}

/// Returns the devices whose threads are blocked in system calls, as a text.
fn held_devices() -> String {
    let held = manyring_engine::held().into_iter().map(|held| held.device);
    held.collect::<Vec<_>>().join(", ")
}
