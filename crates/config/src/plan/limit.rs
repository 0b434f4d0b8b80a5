//! Limits of requests and bytes per second: the key `limit`, and the groups of `[[limit]]`.

use super::{Place, PlanError, Source, device_place, parse_size};
use crate::limit_keys::{DISK, NET, Of, Slot, slot_of};
use crate::tables::{RawLimit, RawScalar};
use manyring_engine::limit::{CREDIT_MS, Rates};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The limit of a device or group. A key with the value 0 is left out: it limits nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LimitPlan {
    #[serde(flatten)]
    keys: BTreeMap<&'static str, u64>,
    /// The name of the `[[limit]]` that the device shares with others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// A limit that several devices share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupPlan {
    /// The place of the group's keys, for errors.
    #[serde(skip)]
    pub place: Place,
    /// Name of the group, unique.
    pub name: String,
    /// The rates that the group's devices share.
    #[serde(flatten)]
    pub limit: LimitPlan,
}

/// The largest rate of requests or packets, per second.
const OPS_MAX: u64 = 100_000_000;
/// The largest rate of bytes, per second.
const BYTES_MAX: u64 = 1 << 40;
/// The longest burst in milliseconds: a minute.
const BURST_MS_MAX: u64 = 60_000;

/// Parses the number of a key. The error is a sentence with the allowed range.
fn parsed(slot: Slot, text: &str) -> Result<u64, String> {
    let (number, min, max, words) = match slot {
        Slot::Ops(_) => (text.parse().ok(), 1, OPS_MAX, ", or 0 for no limit"),
        Slot::Bytes(_) => (parse_size(text), 1, BYTES_MAX, " bytes, like 100M, or 0 for no limit"),
        Slot::Burst => (text.parse().ok(), CREDIT_MS, BURST_MS_MAX, ""),
    };
    let good = number.filter(|n| (min..=max).contains(n) || (*n == 0 && min == 1));
    good.ok_or_else(|| format!("{text} is not a whole number from {min} to {max}{words}"))
}

impl LimitPlan {
    /// Resolves the keys of a limit of a device or a group.
    pub(super) fn new(raw: Option<&RawLimit>, of: Of, place: &Place) -> Result<Self, PlanError> {
        let mut plan = Self::default();
        for (key, RawScalar(text)) in raw.map(|raw| &raw.0).into_iter().flatten() {
            let Some((key, slot)) = of.find(key, place)? else {
                plan.group = Some(text.clone());
                continue;
            };
            match parsed(slot, text) {
                Ok(0) => {}
                Ok(number) => _ = plan.keys.insert(key, number),
                Err(problem) => return place.error(&of.path(key), problem),
            }
        }
        Ok(plan)
    }

    /// Returns the limit with the new values of the keys in `with`. A key whose value is null is
    /// removed; if `with` itself is null, all keys are removed.
    pub(super) fn patched(&self, with: &Value, of: Of, place: &Place) -> Result<Self, PlanError> {
        let mut keys = BTreeMap::new();
        for (key, number) in &self.keys {
            keys.insert((*key).to_owned(), RawScalar(number.to_string()));
        }
        keys.extend(self.group.iter().map(|name| ("group".to_owned(), RawScalar(name.clone()))));
        match with {
            Value::Null => keys.clear(),
            Value::Object(with) => {
                // Keys with null are checked too: an unknown key is a typing error.
                with.keys().try_for_each(|key| of.find(key, place).map(drop))?;
                apply(&mut keys, with);
            }
            other => {
                let problem = format!("{other} is not a table like {{\"read_iops\": 5000}}");
                return place.error("limit", problem);
            }
        }
        Self::new(Some(&RawLimit(keys)), of, place)
    }

    /// True if nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the limit in the form that the engine takes.
    pub fn rates(&self) -> Rates {
        let mut rates = Rates::default();
        for (key, number) in &self.keys {
            match slot_of(key) {
                Some(Slot::Ops(at)) => rates.ops[at] = *number,
                Some(Slot::Bytes(at)) => rates.bytes[at] = *number,
                Some(Slot::Burst) => rates.burst_ms = *number,
                None => {}
            }
        }
        rates
    }

    fn has(&self, of: &[(&str, Slot)]) -> bool {
        of.iter().any(|(key, _)| self.keys.contains_key(key))
    }
}

/// Applies the keys of a JSON request to those of a limit; null removes a key.
fn apply(keys: &mut BTreeMap<String, RawScalar>, with: &Map<String, Value>) {
    for (key, value) in with {
        let text = match value {
            Value::Null => {
                keys.remove(key);
                continue;
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        keys.insert(key.clone(), RawScalar(text));
    }
}

impl GroupPlan {
    pub(super) fn new(mut raw: RawLimit, source: Source) -> Result<Self, PlanError> {
        let name = raw.0.remove("name").map(|RawScalar(name)| name).unwrap_or_default();
        let place = device_place(&name, "[[limit]]", source)?;
        let limit = LimitPlan::new(Some(&raw), Of::Group, &place)?;
        Self { place, name, limit }.checked()
    }

    /// Returns the group with `keys` in place of its present keys.
    ///
    /// # Errors
    /// One line, which names the wrong key and its value.
    pub fn changed(&self, keys: &Map<String, Value>) -> Result<Self, String> {
        let limit = LimitPlan::default().patched(&keys.clone().into(), Of::Group, &self.place);
        let group = limit.and_then(|limit| Self { limit, ..self.clone() }.checked());
        group.map_err(|error| error.to_string())
    }

    fn checked(self) -> Result<Self, PlanError> {
        match self.limit.has(&DISK) && self.limit.has(&NET) {
            true => self.place.error("name", "a group limits disks or networks, not both"),
            false => Ok(self),
        }
    }
}

/// Checks that no two groups have the same name, and that each group that a device names exists and
/// limits devices of that kind.
pub(super) fn check<'a>(
    groups: &[GroupPlan],
    devices: impl Iterator<Item = (&'a Place, &'a LimitPlan, Of)>,
) -> Result<(), PlanError> {
    for (at, GroupPlan { name, place, .. }) in groups.iter().enumerate() {
        if groups[..at].iter().any(|other| other.name == *name) {
            return place.error("name", "is already used by another [[limit]]");
        }
    }
    for (place, limit, of) in devices {
        let Some(wanted) = &limit.group else { continue };
        let Some(group) = groups.iter().find(|group| group.name == *wanted) else {
            return place.error("limit.group", format!("no [[limit]] is named {wanted:?}"));
        };
        let others: &[_] = if of == Of::Disk { &NET } else { &DISK };
        if group.limit.has(others) {
            let problem = format!("{wanted:?} limits another kind of device");
            return place.error("limit.group", problem);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::parse;

    fn blk(limit: &str) -> Result<crate::Plan, String> {
        parse(&format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\nnull = '1G'\n{limit}"))
    }

    #[test]
    fn a_wrong_value_is_one_error_that_names_key_and_value() {
        for (key, value, shown) in [
            ("read_iops", "-1", "-1"),
            ("iops", "18446744073709551615", "18446744073709551615"),
            ("iops", "100000001", "100000001"),
            ("bps", "nan", "NaN"),
            ("write_bps", "inf", "inf"),
            ("bps", "1.5", "1.5"),
            ("bps", "'2T'", "2T"),
            ("bps", "'fast'", "fast"),
            ("iops", "true", "true"),
            ("burst_ms", "49", "49"),
            ("burst_ms", "60001", "60001"),
            ("burst_ms", "0", "0"),
        ] {
            let error = blk(&format!("limit = {{ {key} = {value} }}")).unwrap_err();
            // Numbers beyond 64 bits with a sign are refused by the parser, which shows the line.
            assert!(error.contains(key) && error.contains(shown), "{key} = {value}: {error}");
            assert!(!error.contains('\n') && !error.contains("u64"), "{error}");
        }
        let error = blk("limit = { rx_pps = 5 }").unwrap_err();
        assert!(error.starts_with("[[blk]] a: limit.rx_pps: unknown key; there are read_"));
        let error = blk("limit = { group = 'gold' }").unwrap_err();
        assert_eq!(error, "[[blk]] a: limit.group: no [[limit]] is named \"gold\"");
    }

    #[test]
    fn zero_is_no_limit_and_bytes_have_units() {
        let plan =
            blk("limit = { read_iops = 0, iops = 5, bps = '100M', burst_ms = 200 }").unwrap();
        let rates = plan.blk[0].device.limit.rates();
        assert_eq!((rates.ops, rates.bytes), ([0, 0, 5], [0, 0, 100 << 20]));
        assert_eq!(rates.burst_ms, 200);
        assert!(blk("limit = { iops = 0 }").unwrap().blk[0].device.limit.is_none());
    }

    #[test]
    fn a_group_is_of_disks_or_of_networks_and_has_a_name_of_its_own() {
        let group = |text: &str| blk(&format!("limit = {{ group = 'g' }}\n{text}"));
        assert!(group("[[limit]]\nname = 'g'\niops = 100").is_ok());
        for (text, words) in [
            ("[[limit]]\nname = 'g'\niops = 1\nrx_pps = 1", "disks or networks"),
            ("[[limit]]\nname = 'g'\nrx_pps = 1", "another kind of device"),
            ("[[limit]]\nname = 'g'\n[[limit]]\nname = 'g'", "already used by another"),
            ("[[limit]]\nname = 'g'\niops = -5", "[[limit]] g: iops: -5 is not"),
            ("[[limit]]\nname = 'g'\ngroup = 'h'", "group: unknown key"),
            ("[[limit]]\niops = 5", "name"),
        ] {
            let error = group(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
