//! Recognises images of other formats (qcow2 and the like) by their magic numbers.
//!
//! If such an image were served as a raw disk, its guest would see the container, and overwrite it.

/// Number of bytes at the beginning of a file in which a magic number is searched for.
pub(super) const HEAD_LEN: usize = 512;
/// Number of bytes at the end of a file in which a magic number is searched for: the footer of a
/// VHD.
pub(super) const TAIL_LEN: usize = 512;

/// Magic numbers: the offset from the beginning of the file, the bytes, and the format.
const MAGICS: [(usize, &[u8], &str); 10] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb\0\0\0\x02", "qcow2"),
    (0, b"QFI\xfb\0\0\0\x03", "qcow2"),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (64, b"\x7f\x10\xda\xbe", "VDI"),
];

/// The magic number of a VHD's footer. A VHD that grows has a copy of the footer at its beginning.
const VHD: &[u8] = b"conectix";

/// Returns the format of an image that begins and ends with these bytes; `None` for a raw disk.
pub(super) fn format_of(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    let has = |(offset, magic, _): &&(usize, &[u8], &str)| {
        head.get(*offset..).is_some_and(|bytes| bytes.starts_with(magic))
    };
    let is_vhd = head.starts_with(VHD) || tail.starts_with(VHD);
    MAGICS.iter().find(has).map(|(_, _, format)| *format).or(is_vhd.then_some("VHD"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_magic_is_found_in_its_place_only() {
        for (offset, magic, format) in MAGICS {
            let mut head = [0; HEAD_LEN];
            head[offset..][..magic.len()].copy_from_slice(magic);
            assert_eq!(format_of(&head, &[0; TAIL_LEN]), Some(format));
            // Elsewhere a magic number is data of the guest, and so is one that is cut short.
            head.rotate_right(1);
            assert_eq!(format_of(&head, &[0; TAIL_LEN]), None, "{format}");
            assert_eq!(format_of(&magic[..magic.len() - 1], &[]), None, "{format}");
        }
        assert_eq!(format_of(b"conectix", &[]), Some("VHD"));
        assert_eq!(format_of(&[0; 512], b"conectix\0"), Some("VHD"));
        assert_eq!(format_of(&[0; 512], &[0; 512]), None);
        assert_eq!(format_of(&[], &[]), None);
    }
}
