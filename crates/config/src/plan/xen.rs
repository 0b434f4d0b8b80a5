//! The plan of a back-end for disks of Xen guests: in which xenstore they are announced, and how
//! they are served. The disks themselves are not in the plan: the tool stack writes them into
//! xenstore.

use super::{DiskPlan, Format, LimitPlan, Place, PlanError, Source};
use super::{cache, check_len, device_place, logical_block_size, moderation, on_full, size};
use crate::limit_keys::Of;
use crate::numbers;
use crate::tables::RawXenBlk;
use manyring_device::blk::blkif::{RING_PAGE_ORDER_MAX, XenBlkOptions};
use manyring_protocol::spec::DiskFaultSpec;
use serde::ser::Error;
use serde::{Serialize, Serializer};
use std::path::{Path, PathBuf};

/// The default of `kinds`: a kind for which neither the kernel nor a tool stack has a back-end.
const KIND: &str = "manyring";
/// The default folder for the journals of rings. It lies in memory, since no ring outlives its
/// host. The locks that keep other back-ends from the disks of this machine's Xen are always in
/// this folder.
pub const STATE_DIR: &str = "/run/manyring";
/// Longest name of a kind.
const KIND_LEN_MAX: usize = 32;
/// The default of `persistent_max`, that of Linux's back-end: 96 segments for each of 11 requests.
const PERSISTENT: u32 = 1056;
/// Prefixes of a file's path in the node `params`, by which tool stacks choose a driver.
const FILE_PREFIXES: [&str; 4] = ["aio:", "raw:", "file:", "phy:"];
/// The prefixes that mean a raw image, so the file is not checked for looking like another format.
const RAW_PREFIXES: [&str; 2] = ["aio:", "raw:"];

/// The disks of one xenstore.
#[derive(Clone, Debug, Serialize)]
pub struct XenBlkPlan {
    /// The place of the back-end's keys, for errors.
    #[serde(skip)]
    pub place: Place,
    /// Name of the back-end, unique.
    pub name: String,
    /// The hypervisor that runs the guests.
    pub xen: XenPlan,
    /// The number of the domain in which this process runs.
    pub domain: u16,
    /// The kinds of back-end that are served: folders below `backend/` in xenstore.
    pub kinds: Vec<String>,
    /// True if the host's page cache is not used (`O_DIRECT`).
    pub direct: bool,
    /// `None`: files are raw, and are refused if their bytes look like another format.
    pub format: Option<Format>,
    /// The options of the disks, as far as the tool stack allows them.
    #[serde(flatten, serialize_with = "shown_options")]
    pub options: XenBlkOptions,
    /// The folder of the journals of rings, which the next daemon reads.
    pub state_dir: PathBuf,
    /// The limit of each disk by itself.
    #[serde(skip_serializing_if = "LimitPlan::is_none")]
    pub limit: LimitPlan,
    /// The faults that the device makes on purpose, to test guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<DiskFaultSpec>,
}

/// The hypervisor whose guests are served.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum XenPlan {
    /// The Xen of this machine.
    Real {
        /// Socket or device of xenstore; `None`: the usual one.
        xenstore: Option<PathBuf>,
    },
    /// A simulated Xen.
    Simulated {
        /// Socket of the simulation.
        socket: PathBuf,
    },
}

/// The options as the plan shows them: without `read_only`, which the tool stack says of each disk
/// when its front-end connects.
fn shown_options<S: Serializer>(options: &XenBlkOptions, shows: S) -> Result<S::Ok, S::Error> {
    let mut shown = serde_json::to_value(options).map_err(S::Error::custom)?;
    if let Some(keys) = shown.as_object_mut() {
        keys.remove("read_only");
    }
    shown.serialize(shows)
}

impl XenBlkPlan {
    /// Plans a table `xen_blk`.
    pub fn new(raw: RawXenBlk, index: usize, source: Source) -> Result<Self, PlanError> {
        let name = match (raw.name, index) {
            (Some(name), _) => name,
            (None, 0) => "xen".to_owned(),
            (None, index) => format!("xen{index}"),
        };
        let place = device_place(&name, "[[xen_blk]]", source)?;
        let xen = xen(raw.xenstore, raw.simulated, &place)?;
        let kinds = kinds(raw.kinds, &place)?;
        let num_queues = raw.num_queues.unwrap_or(8);
        numbers::check("num_queues", num_queues as u64, &place)?;
        let persistent_max = raw.persistent_max.unwrap_or(PERSISTENT);
        numbers::check("persistent_max", persistent_max, &place)?;
        let indirect_segments_max = raw.indirect_segments_max.unwrap_or(256);
        numbers::check("indirect_segments_max", indirect_segments_max, &place)?;
        let ring_page_order_max = raw.ring_page_order_max.unwrap_or(RING_PAGE_ORDER_MAX);
        numbers::check("ring_page_order_max", ring_page_order_max, &place)?;
        let options = XenBlkOptions {
            name: name.clone(),
            num_queues,
            read_only: false,
            writeback: cache(raw.cache.as_deref(), &place)?,
            logical_block_size: logical_block_size(raw.logical_block_size, &place)?,
            on_full: on_full::on_full(raw.on_full.as_deref(), &place)?,
            discard: raw.discard.unwrap_or(true),
            barrier: raw.barrier,
            persistent: raw.persistent.unwrap_or(true),
            persistent_max,
            indirect_segments_max,
            ring_page_order_max,
            moderation: moderation(raw.moderation.as_deref(), &place)?,
        };
        Ok(Self {
            xen,
            domain: raw.domain.unwrap_or(0),
            kinds,
            direct: raw.direct,
            format: Format::new(raw.format.as_deref(), &place)?,
            options,
            state_dir: raw.state_dir.unwrap_or_else(|| STATE_DIR.into()),
            limit: LimitPlan::new(raw.limit.as_ref(), Of::Disk, &place)?,
            fault: raw.fault.map(Into::into),
            name,
            place,
        })
    }

    /// Returns the options of the disk `name`: those of the back-end, with the rights to write and
    /// to discard that the tool stack gives the guest.
    pub fn options_of(&self, name: String, read_only: bool, allows_discard: bool) -> XenBlkOptions {
        let discard = self.options.discard && allows_discard;
        XenBlkOptions { name, read_only, discard, ..self.options.clone() }
    }

    /// Plans the disk that the node `params` of the tool stack describes.
    ///
    /// # Errors
    /// One line that begins with `params:`.
    pub fn disk(&self, params: &str) -> Result<DiskPlan, String> {
        let in_sectors = |text: &str| {
            size(text).ok_or_else(|| format!("params: {text:?} is not a size in whole sectors"))
        };
        if let Some(text) = params.strip_prefix("null:") {
            return self.in_blocks(DiskPlan::Null { size: in_sectors(text)? });
        }
        if let Some(text) = params.strip_prefix("memory:") {
            return self.in_blocks(DiskPlan::Memory { size: in_sectors(text)? });
        }
        let plain = FILE_PREFIXES.iter().find_map(|prefix| params.strip_prefix(prefix));
        let path = Path::new(plain.unwrap_or(params));
        if !path.is_absolute() {
            return Err(format!("params: {params:?} is not an absolute path"));
        }
        let is_raw = RAW_PREFIXES.iter().any(|prefix| params.starts_with(prefix));
        let format = if is_raw { Some(Format::Raw) } else { self.format };
        let (path, direct, lock_with_rings) = (path.to_owned(), self.direct, false);
        Ok(DiskPlan::File { path, pinned: None, direct, lock_with_rings, format })
    }
}

impl XenBlkPlan {
    fn in_blocks(&self, disk: DiskPlan) -> Result<DiskPlan, String> {
        let checked = disk.in_blocks(self.options.logical_block_size, &self.place);
        checked.map_err(|error| format!("params: {error}"))
    }
}

fn xen(
    xenstore: Option<PathBuf>,
    simulated: Option<PathBuf>,
    place: &Place,
) -> Result<XenPlan, PlanError> {
    match (xenstore, simulated) {
        (Some(_), Some(_)) => {
            place.error("simulated", format!("cannot be combined with {}", place.key("xenstore")))
        }
        (None, Some(socket)) => {
            check_len(&socket, place, "simulated")?;
            Ok(XenPlan::Simulated { socket })
        }
        (xenstore, None) => {
            if let Some(path) = &xenstore {
                check_len(path, place, "xenstore")?;
            }
            Ok(XenPlan::Real { xenstore })
        }
    }
}

fn kinds(raw: Option<Vec<String>>, place: &Place) -> Result<Vec<String>, PlanError> {
    let kinds = raw.unwrap_or_else(|| vec![KIND.to_owned()]);
    if kinds.is_empty() {
        return place.error("kinds", "is empty; name at least one");
    }
    for (index, kind) in kinds.iter().enumerate() {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if !(1..=KIND_LEN_MAX).contains(&kind.len()) || !kind.chars().all(is_plain) {
            let problem =
                format!("{kind:?} is not 1 to {KIND_LEN_MAX} letters, digits, '-' or '_'");
            return place.error("kinds", problem);
        }
        if kinds[..index].contains(kind) {
            return place.error("kinds", format!("{kind:?} is given twice"));
        }
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    fn xen(keys: &str) -> Result<XenBlkPlan, String> {
        plan(&format!("[[xen_blk]]\n{keys}")).map(|mut plan| plan.xen_blk.remove(0))
    }

    #[test]
    fn a_table_without_keys_serves_our_own_kind_of_this_machines_xen() {
        let plan = xen("").unwrap();
        assert_eq!((plan.name.as_str(), &plan.kinds), ("xen", &vec!["manyring".to_owned()]));
        assert!(matches!(plan.xen, XenPlan::Real { xenstore: None }));
        let options = &plan.options;
        assert!(options.persistent && options.writeback && options.discard && !options.barrier);
    }

    #[test]
    fn a_plan_shows_no_key_that_each_disk_has_from_the_tool_stack() {
        let shown = serde_json::to_value(xen("discard = false").unwrap()).unwrap();
        assert_eq!(shown["discard"], false);
        assert_eq!(shown["name"], "xen");
        assert_eq!(shown.get("read_only"), None, "{shown}");
    }

    #[test]
    fn params_name_a_file_with_or_without_the_tool_stacks_prefix_or_no_file() {
        let plan = xen("direct = true").unwrap();
        for (params, format) in [
            ("/d.img", None),
            ("phy:/d.img", None),
            ("file:/d.img", None),
            ("raw:/d.img", Some(Format::Raw)),
            ("aio:/d.img", Some(Format::Raw)),
        ] {
            let disk = plan.disk(params).unwrap();
            let DiskPlan::File { path, direct: true, format: found, .. } = disk else { panic!() };
            assert_eq!((path.as_path(), found), (Path::new("/d.img"), format), "{params}");
        }
        assert!(matches!(plan.disk("null:1G"), Ok(DiskPlan::Null { size: 0x4000_0000 })));
        assert!(matches!(plan.disk("memory:64K"), Ok(DiskPlan::Memory { size: 65536 })));
        for params in ["", "d.img", "aio:d.img", "nbd://host/", "null:", "null:1", "memory:x"] {
            let error = plan.disk(params).expect_err(params);
            assert!(error.starts_with("params: "), "{error}");
        }
    }

    #[test]
    fn every_error_names_its_key() {
        for (keys, key) in [
            ("kinds = []", "kinds"),
            ("kinds = ['a/b']", "kinds"),
            ("kinds = ['vbd', 'vbd']", "kinds"),
            ("num_queues = 0", "num_queues"),
            ("num_queues = 257", "num_queues"),
            ("persistent_max = 0", "persistent_max"),
            ("indirect_segments_max = 4097", "indirect_segments_max"),
            ("ring_page_order_max = 5", "ring_page_order_max"),
            ("simulated = '/s'\nxenstore = '/x'", "simulated"),
            ("cache = 'none'", "cache"),
            ("on_full = 'stop'", "on_full"),
            ("logical_block_size = 8192", "logical_block_size"),
            ("format = 'qcow2'", "format"),
            ("moderation = 'on'", "moderation"),
            ("name = 'a b'", "name"),
        ] {
            let error = xen(keys).expect_err(keys);
            assert!(error.starts_with("[[xen_blk]] ") && error.contains(key), "{keys}\n-> {error}");
        }
    }

    #[test]
    fn a_name_that_the_disks_of_a_xen_could_have_is_refused() {
        let blk = |name: &str| {
            format!("[[xen_blk]]\n[[blk]]\nname = '{name}'\nsocket_path = '/s'\nnull = '1G'\n")
        };
        assert!(plan(&blk("xenon")).is_ok());
        for name in ["xen", "xen-vbd-1-51712"] {
            let error = plan(&blk(name)).expect_err(name);
            assert!(error.contains("name"), "{error}");
        }
    }
}
