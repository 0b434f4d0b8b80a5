//! `manyring snippet helper`: a systemd unit that runs qemu-storage-daemon or nbdkit, and the table
//! `[[blk]]` of a disk that the unit serves.

/// The kinds of storage for which there is a snippet.
const KINDS: [&str; 3] = ["ceph", "qcow2", "s3"];

/// Returns the snippet for a disk in this kind of storage.
pub(super) fn text(kind: Option<&str>) -> Result<String, String> {
    let (what, server) = match kind {
        Some("ceph") => (
            "images of a Ceph pool, each named after its device",
            storage_daemon(
                "driver=rbd,node-name=d,pool=rbd,image=%i,conf=/etc/ceph/ceph.conf,cache.direct=on",
            ),
        ),
        Some("qcow2") => (
            "qcow2 files in /srv/images (also vmdk, luks, ..: driver=)",
            storage_daemon(
                "driver=file,node-name=f,filename=/srv/images/%i.qcow2 \\\n    \
                 --blockdev driver=qcow2,node-name=d,file=f",
            ),
        ),
        Some("s3") => (
            "objects of a bucket that curl can read; their guests may not write",
            "nbdkit -f -r -t 16 -U /run/manyring-helper/%i/nbd.sock -e %i \\\n    \
             curl https://bucket.example/%i.img"
                .to_owned(),
        ),
        _ => return Err(format!("DEVICE: is not one of {}", KINDS.join(", "))),
    };
    // A completed write must be on stable storage: if a killed server lost it, the guest would not
    // notice.
    let keys = match kind {
        Some("s3") => "read_only = true\n",
        Some("qcow2") => "cache = \"writethrough\"\n",
        _ => "",
    };
    Ok(format!(
        "# /etc/systemd/system/manyring-helper@.service: {what}\n\
         # systemctl enable --now manyring-helper@vm1\n\
         [Unit]\n\
         Description=NBD server of the disk %i\n\
         Before=manyring.service\n\n\
         [Service]\n\
         RuntimeDirectory=manyring-helper/%i\n\
         ExecStartPre=-/usr/bin/rm -f /run/manyring-helper/%i/nbd.sock\n\
         ExecStart=/usr/bin/env {server}\n\
         Restart=always\n\
         RestartSec=100ms\n\
         NoNewPrivileges=yes\n\
         ProtectSystem=strict\n\
         ProtectHome=yes\n\
         PrivateTmp=yes\n\n\
         [Install]\n\
         WantedBy=multi-user.target\n\n\
         # manyring.toml\n\
         [[blk]]\n\
         name = \"vm1\"\n\
         socket_path = \"/run/manyring/vm1.sock\"\n\
         nbd = \"nbd+unix:///vm1?socket=/run/manyring-helper/vm1/nbd.sock\"\n{keys}"
    ))
}

/// Returns the command line of qemu-storage-daemon with this block node, exported under the
/// device's name.
fn storage_daemon(node: &str) -> String {
    format!(
        "qemu-storage-daemon --blockdev {node} \\\n    \
         --nbd-server addr.type=unix,addr.path=/run/manyring-helper/%i/nbd.sock,max-connections=16 \
         \\\n    --export type=nbd,id=e,node-name=d,name=%i,writable=on"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_config as config;

    #[test]
    fn each_helper_has_a_unit_and_a_device() {
        for kind in KINDS {
            let text = text(Some(kind)).unwrap();
            let (unit, device) = text.split_once("# manyring.toml\n").unwrap();
            let plan = config::parse(device).unwrap();
            assert_eq!(plan.blk[0].options.read_only, kind == "s3", "{text}");
            assert_eq!(plan.blk[0].options.writeback, kind != "qcow2", "{text}");
            let lines = unit.lines().filter(|line| !line.starts_with([' ', '#', '[']));
            assert!(lines.filter(|line| !line.is_empty()).all(|line| line.contains('=')), "{unit}");
        }
        assert_eq!(text(Some("nfs")), Err("DEVICE: is not one of ceph, qcow2, s3".to_owned()));
        assert!(text(None).is_err());
    }
}
