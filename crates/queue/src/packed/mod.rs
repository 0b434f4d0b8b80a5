//! The packed virtqueue (virtio 1.3 §2.8): device half and driver half.

mod device;
mod driver;
pub(crate) mod trail;

pub use crate::config::RingAreas;
pub use device::PackedDeviceHalf;
pub use driver::PackedDriverHalf;
