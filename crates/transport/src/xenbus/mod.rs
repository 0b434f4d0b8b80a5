//! xenbus: the disks of Xen guests, which are offered and connected through xenstore.
//!
//! xenstore is a tree of strings that the tool stack, back-ends and front-ends write and watch. A
//! device is two folders in it: the back-end's, in the home of the domain that serves, and the
//! front-end's, in the home of the guest.
//!
//! ```text
//! store       the client: requests and replies, watches, transactions
//! ```

mod store;

pub use store::{
    Changed, DEVICE, Endpoint, SOCKET, Store, StoreError, Transaction, Tries, Watch,
    default_endpoint,
};
