//! The changes that an operator can ask for: the size of a disk; link, MTU and announcement of a
//! network device.

use crate::device_by_name::find;
use crate::put_patch_delete::refuse;
use crate::refusal::{Problem, Refusal, aside};
use crate::request_parts::{Body, Name, bad};
use crate::state::State;
use axum::Json;
use axum::extract::{Extension, State as Extract};
use axum::http::StatusCode;
use manyring_device::DiskSide;
use manyring_device::net::{NetSide, is_mtu};
use manyring_supervisor::model::{Change, Controlled, Who};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, OwnedSemaphorePermit};
use tokio::task::JoinError;
use utoipa::ToSchema;

/// The body of a resize. Without `size`, the disk becomes as large as the host's file is now.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Resize {
    /// The new size in bytes, a multiple of 512.
    #[schema(minimum = 512, maximum = 9223372036854775296u64, multiple_of = 512)]
    size: Option<u64>,
    /// True: the new size may be smaller than the present one.
    #[serde(default)]
    shrink: bool,
}

/// The answer to a resize.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Resized {
    name: String,
    /// The size of the disk in bytes after the resize.
    size: u64,
}

/// The body of a change of the link.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Link {
    up: bool,
}

/// The answer to a change of the link.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Linked {
    name: String,
    /// The state of the link after the change: `up` or `down`.
    link: &'static str,
}

/// The body of a change of the MTU.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Mtu {
    /// The MTU in bytes, 68 to 65535.
    #[schema(minimum = 68, maximum = 65535)]
    mtu: u64,
}

/// The answer to a change of the MTU.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MtuSet {
    name: String,
    /// The MTU in bytes after the change.
    mtu: u16,
}

/// The body of an announcement.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Announce {}

/// The answer to an announcement.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Announced {
    name: String,
    /// Always true: the guest's driver was asked to announce the guest.
    announces: bool,
}

/// Gives a disk another size; without a body, that of the file on the host.
#[utoipa::path(
    post,
    path = "/v1/devices/{name}/resize",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = Option<Resize>,
    responses(
        (status = 200, body = Resized, description = "Its size now"),
        (status = 404, body = Problem, description = "No device has the name"),
        (status = 409, body = Problem, description = "Busy, or smaller without `shrink`"),
        (status = 422, body = Problem, description = "The device does not support this"),
    )
)]
pub(super) async fn resize(
    Extract(state): Extract<State>,
    Name(name): Name,
    body: Body,
) -> Result<Json<Resized>, Refusal> {
    let controlled = find(&state, &name)?;
    let device = blk_of(&controlled)?;
    let Resize { size: wanted, shrink } = body.parse()?;
    if let Some(size) = wanted.filter(|size| *size == 0 || !size.is_multiple_of(512)) {
        return Err(bad(format!("size: {size} is not a multiple of 512 bytes")));
    }
    let permit = (begin(&controlled)?, begin_here(&state)?);
    // Any other change of the size needs the permit too, so this size stays true until the end.
    let size = device.host.size();
    if let Some(wanted) = wanted.filter(|wanted| *wanted < size && !shrink) {
        return Err(refuse_shrink(wanted, size));
    }
    // Without a size in the request, the host's file decides: it may have become smaller.
    if wanted.is_none() && !shrink {
        let disk = device.host.disk().clone();
        let measured = aside(move || disk.measure()).await?.map_err(refuse_resize)?;
        if measured < size {
            return Err(refuse_shrink(measured, size));
        }
    }
    let is_isolated = controlled.view.process.is_some();
    // A device process may have requests in flight beyond the new end, so the supervisor ends the
    // process before it cuts the disk. Any other resize is done here.
    let resized = match wanted.filter(|wanted| *wanted < size && is_isolated) {
        Some(wanted) => {
            let (processes, name) = (state.processes.clone(), name.clone());
            whole(permit, async move { processes.shrink(&name, wanted).await }).await?
        }
        None => {
            let resize = move || {
                let _permit = permit;
                device.resizes.resize(wanted)
            };
            aside(resize).await?
        }
    };
    match resized {
        Ok(size) => {
            tracing::info!(device = name, size, "resized");
            Ok(Json(Resized { name, size }))
        }
        Err(errno) => {
            tracing::warn!(device = name, %errno, "resizing the disk failed");
            Err(refuse_resize(errno))
        }
    }
}

/// Takes the link of a network device down or up, as a pulled or plugged cable does.
#[utoipa::path(
    post,
    path = "/v1/devices/{name}/link",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = Link,
    responses(
        (status = 200, body = Linked, description = "Its link now"),
        (status = 404, body = Problem, description = "No device has the name"),
        (status = 409, body = Problem, description = "The device is busy or not served yet"),
        (status = 422, body = Problem, description = "The device does not support this"),
    )
)]
pub(super) async fn link(
    Extract(state): Extract<State>,
    Name(name): Name,
    body: Body,
) -> Result<Json<Linked>, Refusal> {
    let controlled = find(&state, &name)?;
    let device = net_of(&controlled)?;
    let Link { up } = body.parse()?;
    let permit = begin(&controlled)?;
    whole(permit, async move { device.set_link(up).await }).await?;
    let link = if up { "up" } else { "down" };
    tracing::info!(device = name, link, "link changed");
    Ok(Json(Linked { name, link }))
}

/// Sets the MTU of an interface.
#[utoipa::path(
    post,
    path = "/v1/devices/{name}/mtu",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = Mtu,
    responses(
        (status = 200, body = MtuSet, description = "Its MTU now"),
        (status = 404, body = Problem, description = "No device has the name"),
        (status = 409, body = Problem, description = "The device is busy or not served yet"),
        (status = 422, body = Problem, description = "The device does not support this"),
    )
)]
pub(super) async fn mtu(
    Extract(state): Extract<State>,
    Name(name): Name,
    Extension(who): Extension<Who>,
    body: Body,
) -> Result<Json<MtuSet>, Refusal> {
    let controlled = find(&state, &name)?;
    net_of(&controlled)?;
    let Mtu { mtu } = body.parse()?;
    let Some(mtu) = u16::try_from(mtu).ok().filter(|mtu| is_mtu(*mtu)) else {
        return Err(bad(format!("mtu: {mtu} is not between 68 and 65535")));
    };
    let _permit = begin(&controlled)?;
    // The supervisor makes this change, so that `GET /v1/config` and the saved devices have the new
    // MTU too.
    state.changes.ask(Change::Mtu { name: name.clone(), mtu }, who).await.map_err(refuse)?;
    tracing::info!(device = name, mtu, "MTU changed");
    Ok(Json(MtuSet { name, mtu }))
}

/// Asks the guest's driver to announce the guest to its network (`VIRTIO_NET_S_ANNOUNCE`).
#[utoipa::path(
    post,
    path = "/v1/devices/{name}/announce",
    params(("name" = String, Path, description = "Name of the device", example = "vm1")),
    request_body = Option<Announce>,
    responses(
        (status = 200, body = Announced, description = "The guest's driver was asked"),
        (status = 404, body = Problem, description = "No device has the name"),
        (status = 409, body = Problem, description = "No driver runs that can announce the guest"),
        (status = 422, body = Problem, description = "The device does not support this"),
    )
)]
pub(super) async fn announce(
    Extract(state): Extract<State>,
    Name(name): Name,
    body: Body,
) -> Result<Json<Announced>, Refusal> {
    let controlled = find(&state, &name)?;
    let device = net_of(&controlled)?;
    let Announce {} = body.parse()?;
    // Refreshes the features that the guest's driver has negotiated: a device process reports them
    // only when it is asked.
    state.processes.count_of(&name).await;
    if device.announce() {
        tracing::info!(device = name, "the guest is asked to announce itself");
        return Ok(Json(Announced { name, announces: true }));
    }
    let error = "the guest runs no driver that can announce itself, or its VMM handles the \
                 control queue";
    Err(Refusal::new(StatusCode::CONFLICT, error))
}

fn blk_of(controlled: &Controlled) -> Result<DiskSide, Refusal> {
    let wrong = || wrong_kind("this device is a network device, not a disk");
    controlled.view.side.as_blk().cloned().ok_or_else(wrong)
}

fn net_of(controlled: &Controlled) -> Result<Arc<dyn NetSide>, Refusal> {
    let wrong = || wrong_kind("this device is a disk, not a network device");
    controlled.view.side.as_net().cloned().ok_or_else(wrong)
}

fn wrong_kind(error: &str) -> Refusal {
    Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error)
}

/// Takes the permit of which each device has one. Fails with status 409 while another request
/// changes the device.
fn begin(controlled: &Controlled) -> Result<OwnedSemaphorePermit, Refusal> {
    controlled.changing.clone().try_acquire_owned().map_err(|_| {
        Refusal::new(StatusCode::CONFLICT, "another change of this device is under way")
    })
}

/// Takes the lock that keeps a takeover from beginning during this change. Fails with status 409 if
/// a takeover is under way.
fn begin_here(state: &State) -> Result<OwnedRwLockReadGuard<()>, Refusal> {
    state.processes.change_now().ok_or_else(|| {
        Refusal::new(StatusCode::CONFLICT, "a takeover by another daemon is under way; try again")
    })
}

/// Runs a change in a task of its own, so that the change completes even if the client disconnects
/// before; `permit` is held until then.
async fn whole<T: Send + 'static>(
    permit: impl Send + 'static,
    change: impl Future<Output = T> + Send + 'static,
) -> Result<T, Refusal> {
    let ended = tokio::spawn(async move {
        let _permit = permit;
        change.await
    });
    // Nobody aborts the task: a `JoinError` means that the change panicked.
    let failed = |error: JoinError| error.to_string();
    let ended = ended.await.map_err(failed);
    ended.map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error))
}

/// Refuses a smaller size without `shrink`: a mistyped size would destroy the guest's data.
fn refuse_shrink(wanted: u64, size: u64) -> Refusal {
    let error = format!(
        "size: {wanted} bytes is less than the disk has ({size}): the data beyond that would be \
         lost. Shrink the guest's file system first, then repeat the request with --shrink \
         (\"shrink\": true)"
    );
    Refusal::new(StatusCode::CONFLICT, error)
}

/// The refusal for an error of a resize: status 409 or 422 if the request cannot be carried out on
/// this disk, 500 if the host failed.
fn refuse_resize(errno: Errno) -> Refusal {
    let (status, text) = match errno {
        Errno::OPNOTSUPP => {
            (StatusCode::UNPROCESSABLE_ENTITY, "this disk cannot be resized".to_owned())
        }
        Errno::ROFS => (StatusCode::CONFLICT, "the disk is read-only".to_owned()),
        Errno::BUSY => (
            StatusCode::CONFLICT,
            "requests in flight did not complete in time; the size is unchanged".to_owned(),
        ),
        Errno::INVAL => {
            (StatusCode::UNPROCESSABLE_ENTITY, "the disk does not support that size".to_owned())
        }
        errno => (StatusCode::INTERNAL_SERVER_ERROR, format!("resizing failed: {errno}")),
    };
    Refusal::new(status, text)
}
