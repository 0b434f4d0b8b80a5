//! `Blkfront`: a Xen block front-end in a simulated domain: it connects through xenstore.
//!
//! ```text
//! its folder     backend, backend-id: by the tool stack
//! back-end       state InitWait: its offer is there
//! front-end      rings and event channels are made and written down; state Initialised
//! back-end       state Connected: size and blocks are there
//! front-end      state Connected; requests flow
//! ```

mod queue;
mod request;

pub use queue::BlkfrontQueue;
pub use request::{BlkfrontOptions, XenDone, XenOp};

use crate::{DriverError, XenDomain, XenStore};
use manyring_wire::xen::device::{Connection, DiskGeometry, Nodes, Offer};
use manyring_wire::xen::keys;
use manyring_wire::xen::state::XenbusState;
use std::sync::Arc;

/// A guest with a disk.
#[derive(Debug)]
pub struct Blkfront {
    /// The simulated domain of the guest.
    pub domain: Arc<XenDomain>,
    /// The queues; may be moved out, one to each thread.
    pub queues: Vec<BlkfrontQueue>,
    /// The features that the back-end has offered.
    pub offer: Offer,
    /// The disk as the back-end described it when the front-end connected.
    pub disk: DiskGeometry,
    store: XenStore,
    folder: String,
    backend: String,
}

impl Blkfront {
    /// Connects to the back-end of the disk whose nodes lie in `folder`, a path relative to the
    /// domain's own nodes, such as `device/vbd/51712`. Uses at most the queues, ring size,
    /// persistent grants and indirect segments that the back-end offers.
    ///
    /// # Errors
    /// [`DriverError::Timeout`] if the back-end does not reach the next state in time;
    /// [`DriverError::Store`] for nodes that are missing or wrong.
    pub fn connect(
        domain: &Arc<XenDomain>,
        folder: &str,
        options: &BlkfrontOptions,
    ) -> Result<Self, DriverError> {
        let mut store = XenStore::new(domain.store().try_clone()?, options.max_wait);
        let backend = text(&mut store, &format!("{folder}/{}", keys::BACKEND.name))?;
        let number = text(&mut store, &format!("{folder}/{}", keys::BACKEND_ID.name))?;
        let number = number.parse().map_err(|_| wrong(keys::BACKEND_ID.name, &number))?;
        set_state(&mut store, folder, XenbusState::Initialising)?;
        await_state(&mut store, &backend, XenbusState::InitWait)?;
        let offer = Offer::parse(&nodes(&mut store, &backend)?);
        let offer = offer.map_err(|error| DriverError::Store(error.to_string()))?;
        let used = BlkfrontOptions {
            queues: options.queues.clamp(1, offer.queues_max.max(1)),
            ring_page_order: options.ring_page_order.min(offer.ring_page_order_max),
            persistent: options.persistent && offer.persistent,
            indirect_segments: options.indirect_segments.min(offer.indirect_segments_max),
            ..*options
        };
        let queues = (0..used.queues).map(|_| BlkfrontQueue::new(domain, number, &used));
        let queues = queues.collect::<Result<Vec<_>, _>>()?;
        let connection = Connection {
            abi: used.abi,
            ring_page_order: used.ring_page_order,
            persistent: used.persistent,
            queues: queues.iter().map(BlkfrontQueue::nodes).collect(),
        };
        for (name, value) in connection.emit() {
            store.write(&format!("{folder}/{name}"), value)?;
        }
        set_state(&mut store, folder, XenbusState::Initialised)?;
        await_state(&mut store, &backend, XenbusState::Connected)?;
        let disk = read_disk(&mut store, &backend)?;
        set_state(&mut store, folder, XenbusState::Connected)?;
        let (domain, folder) = (domain.clone(), folder.to_owned());
        Ok(Self { domain, queues, offer, disk, store, folder, backend })
    }

    /// The domain's connection to xenstore.
    #[must_use]
    pub fn store(&mut self) -> &mut XenStore {
        &mut self.store
    }

    /// The disk as the back-end describes it now.
    ///
    /// # Errors
    /// [`DriverError::Store`].
    pub fn look_at_disk(&mut self) -> Result<DiskGeometry, DriverError> {
        self.disk = read_disk(&mut self.store, &self.backend)?;
        Ok(self.disk)
    }

    /// Disconnects from the disk: writes `Closing`, writes `Closed` when the back-end has seen
    /// that, waits until the back-end has closed too, and ends all grants. Returns how many pages
    /// the back-end still has mapped.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::Store`].
    pub fn close(&mut self) -> Result<usize, DriverError> {
        set_state(&mut self.store, &self.folder, XenbusState::Closing)?;
        let closed = [XenbusState::Closed, XenbusState::Unknown];
        let has_heard = [XenbusState::Closing, XenbusState::Closed, XenbusState::Unknown];
        self.await_one_of(&has_heard)?;
        set_state(&mut self.store, &self.folder, XenbusState::Closed)?;
        self.await_one_of(&closed)?;
        Ok(self.queues.iter_mut().map(BlkfrontQueue::end_grants).sum())
    }

    /// Waits until the back-end is in one of these states. A back-end without a `state` node is in
    /// none.
    fn await_one_of(&mut self, states: &[XenbusState]) -> Result<(), DriverError> {
        let is_one = |value: Option<&[u8]>| {
            let state = value.map_or(Some(XenbusState::Unknown), XenbusState::parse);
            state.is_some_and(|state| states.contains(&state))
        };
        self.store.await_value(&format!("{}/{}", self.backend, keys::BACK_STATE.name), is_one)
    }
}

fn wrong(name: &str, value: &str) -> DriverError {
    DriverError::Store(format!("{name}: \"{value}\""))
}

fn set_state(store: &mut XenStore, folder: &str, state: XenbusState) -> Result<(), DriverError> {
    store.write(&format!("{folder}/{}", keys::FRONT_STATE.name), state.emit())
}

fn await_state(store: &mut XenStore, backend: &str, state: XenbusState) -> Result<(), DriverError> {
    let is_there = |value: Option<&[u8]>| value.and_then(XenbusState::parse) == Some(state);
    store.await_value(&format!("{backend}/{}", keys::BACK_STATE.name), is_there)
}

fn text(store: &mut XenStore, at: &str) -> Result<String, DriverError> {
    let value = store.read(at)?.ok_or_else(|| DriverError::Store(format!("{at}: no such node")))?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// Reads the values of all nodes in a folder.
fn nodes(store: &mut XenStore, folder: &str) -> Result<Nodes, DriverError> {
    let mut nodes = Nodes::new();
    for name in store.children(folder)? {
        if let Some(value) = store.read(&format!("{folder}/{name}"))? {
            nodes.insert(name, value);
        }
    }
    Ok(nodes)
}

fn read_disk(store: &mut XenStore, backend: &str) -> Result<DiskGeometry, DriverError> {
    let nodes = nodes(store, backend)?;
    DiskGeometry::parse(&nodes).map_err(|error| DriverError::Store(error.to_string()))
}
