//! The split virtqueue (virtio 1.3 §2.7): device half and driver half.

mod device;
mod driver;
mod heads;

pub use crate::config::RingAreas;
pub use device::SplitDeviceHalf;
pub use driver::SplitDriverHalf;
