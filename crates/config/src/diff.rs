//! Computes the steps from the running plan to the desired one. It compares the two plans alone,
//! and looks at no file or interface of the host.

use super::plan::{Class, Domains, Plan, SwitchPlan, Wanted, class_of};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// A step from the running plan to the desired one.
#[derive(Clone, Debug)]
pub struct Step {
    /// Name of the device or switch; for keys that belong to neither, their table, like `[daemon]`.
    pub name: String,
    /// The change that the step makes.
    pub what: What,
}

/// The change that a step makes to a device or a switch.
#[derive(Clone, Debug)]
pub enum What {
    /// The device is added.
    Add(Wanted),
    /// The device is removed.
    Remove,
    /// These keys of the device have new values. The [`Class`] says when they take effect.
    Change(Wanted, Class, Vec<String>),
    /// The switch is added. This step precedes the steps of the devices that are ports of the
    /// switch.
    AddSwitch(SwitchPlan),
    /// These keys of the switch have new values. A new device process with these values replaces
    /// the switch's process at once.
    ChangeSwitch(SwitchPlan, Vec<String>),
    /// The switch is removed. This step follows the steps of the devices that are its ports.
    RemoveSwitch,
    /// These groups of `[[limit]]` get new rates.
    Limits(Vec<String>),
    /// These keys have new values, which the daemon reads only when it starts.
    NeedsRestart(Vec<String>),
}

/// The name of a step whose keys take effect only when the daemon is started again.
pub const RESTART: &str = "restart";

/// A step as the API shows it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct StepInfo {
    /// Name of the device.
    pub device: String,
    /// `add` or `remove`; for a change of keys, when it takes effect: `live`, `reconnect`,
    /// `replace`, or `restart` (when the daemon is started again).
    pub step: String,
    /// The keys whose values differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

impl Step {
    /// Returns the step as the control API shows it.
    pub fn info(&self) -> StepInfo {
        let (step, keys) = match &self.what {
            What::Add(_) | What::AddSwitch(_) => ("add", Vec::new()),
            What::Remove | What::RemoveSwitch => ("remove", Vec::new()),
            What::Change(_, class, keys) => (class.name(), keys.clone()),
            What::ChangeSwitch(_, keys) => (Class::Live.name(), keys.clone()),
            What::Limits(names) => (Class::Live.name(), names.clone()),
            What::NeedsRestart(keys) => (RESTART, keys.clone()),
        };
        StepInfo { device: self.name.clone(), step: step.to_owned(), keys }
    }
}

/// Returns the step of one device, none if it does not differ. The caller knows that the plans
/// differ in no other device.
pub fn diff_of(name: &str, running: &Plan, desired: &Plan) -> Vec<Step> {
    let step = |what| Step { name: name.to_owned(), what };
    let what = match (running.device(name), desired.device(name)) {
        (None, None) => None,
        (Some(_), None) => Some(What::Remove),
        (None, Some(device)) => Some(What::Add(device)),
        (Some(former), Some(device)) => changed_device(&former, &device),
    };
    what.map(step).into_iter().collect()
}

/// Returns the step that gives groups of limits their new rates; `None` if no rate differs.
pub fn limits(running: &Plan, desired: &Plan) -> Option<Step> {
    let names = running.limit.iter().chain(&desired.limit).map(|group| &group.name);
    let names: BTreeSet<_> = names.collect();
    let of = |plan: &Plan, name: &str| {
        plan.limit.iter().find(|group| group.name == name).map(|group| group.limit.clone())
    };
    let differs = |name: &&String| of(running, name) != of(desired, name);
    let names: Vec<_> = names.into_iter().filter(differs).cloned().collect();
    (!names.is_empty()).then(|| Step { name: "[[limit]]".to_owned(), what: What::Limits(names) })
}

/// Compares a device that both plans have; returns `None` if all its keys are equal.
fn changed_device(former: &Wanted, device: &Wanted) -> Option<What> {
    let keys = changed(&former.keys(), &device.keys());
    let class = class(device, &keys);
    (!keys.is_empty()).then(|| What::Change(device.clone(), class, keys))
}

/// Returns all steps from `running` to `desired`: added and changed switches, removed devices,
/// changed devices, added devices, removed switches, limits, and the keys that need a restart.
pub fn diff(running: &Plan, desired: &Plan) -> Vec<Step> {
    let [mut steps, gone] = switches(running, desired);
    let now: Vec<_> = running.wanted().collect();
    // A switch that cannot change while the daemon runs stays as it is, so its ports are compared
    // as ports of the running switch.
    let mut until_restart = desired.clone();
    until_restart.keep_switches(running);
    let then: Vec<_> = until_restart.wanted().collect();
    let find = |all: &[Wanted], name: &str| all.iter().find(|d| d.plan().name == name).cloned();
    for device in &now {
        let name = &device.plan().name;
        if find(&then, name).is_none() {
            steps.push(Step { name: name.clone(), what: What::Remove });
        }
    }
    for device in &then {
        let name = &device.plan().name;
        let Some(former) = find(&now, name) else { continue };
        if let Some(what) = changed_device(&former, device) {
            steps.push(Step { name: name.clone(), what });
        }
    }
    for device in &then {
        let name = &device.plan().name;
        if find(&now, name).is_none() {
            steps.push(Step { name: name.clone(), what: What::Add(device.clone()) });
        }
    }
    // A switch is removed only after the devices that were its ports.
    steps.extend(gone);
    steps.extend(limits(running, desired));
    let restart = [
        ("[daemon]", changed(&value(&running.daemon), &value(&desired.daemon))),
        ("[[xen_blk]]", changed_xen(running, desired)),
        ("[[switch]]", changed_switches(running, desired)),
    ];
    for (name, keys) in restart {
        if !keys.is_empty() {
            steps.push(Step { name: name.to_owned(), what: What::NeedsRestart(keys) });
        }
    }
    steps
}

/// Returns the class of a change of several keys: the class of the key whose change costs the guest
/// most.
fn class(device: &Wanted, keys: &[String]) -> Class {
    let of = |key: &String| match (key.as_str(), device) {
        // If `mtu` is removed, there is no value that could be set on the running interface.
        ("mtu", Wanted::Net(net)) if net.options.mtu.is_none() => Class::Reconnect,
        (key, _) => class_of(key).unwrap_or(Class::Replace),
    };
    keys.iter().map(of).max().unwrap_or(Class::Live)
}

fn value<T: Serialize>(of: &T) -> Map<String, Value> {
    match serde_json::to_value(of) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn changed_xen(running: &Plan, desired: &Plan) -> Vec<String> {
    let all = |plan: &Plan| serde_json::to_value(&plan.xen_blk).unwrap_or_default();
    if all(running) == all(desired) { Vec::new() } else { vec!["xen_blk".to_owned()] }
}

/// Returns the steps of switches that are added or changed, and those of removed switches.
fn switches(running: &Plan, desired: &Plan) -> [Vec<Step>; 2] {
    let lacks = |plan: &Plan, name: &str| plan.switch.iter().all(|switch| switch.name != name);
    let step = |of: &SwitchPlan, what| Step { name: of.name.clone(), what };
    let come = desired.switch.iter().filter(|of| lacks(running, &of.name));
    let go = running.switch.iter().filter(|of| lacks(desired, &of.name));
    let come = come.map(|of| step(of, What::AddSwitch(of.clone())));
    let change = |of: &SwitchPlan| {
        let now = running.switch_now(of, true)?;
        let keys = changed(&value(now), &value(of));
        (!keys.is_empty()).then(|| step(of, What::ChangeSwitch(of.clone(), keys)))
    };
    [
        come.chain(desired.switch.iter().filter_map(change)).collect(),
        go.map(|of| step(of, What::RemoveSwitch)).collect(),
    ]
}

/// Returns the differing keys of switches that both plans have and that cannot change until the
/// daemon is started again.
fn changed_switches(running: &Plan, desired: &Plan) -> Vec<String> {
    let mut keys = BTreeSet::new();
    for then in &desired.switch {
        if let Some(now) = running.switch_now(then, false) {
            keys.extend(changed(&value(now), &value(then)));
        }
    }
    keys.into_iter().collect()
}

/// Returns the keys whose values differ, named as a user writes them.
fn changed(a: &Map<String, Value>, b: &Map<String, Value>) -> Vec<String> {
    let names: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let differs = |name: &&&String| a.get(**name) != b.get(**name);
    names.iter().filter(differs).map(|name| written(name)).collect()
}

/// Returns the key of the configuration file from which a field of a plan is made.
fn written(part: &str) -> String {
    match part {
        "socket" => "socket_path",
        "disk" => "file",
        "port" => "tap",
        "writeback" => "cache",
        part => part,
    }
    .to_owned()
}

impl Wanted {
    /// Returns the fields of the device's plan and its kind, to compare them with another plan.
    fn keys(&self) -> Map<String, Value> {
        let mut keys = match self {
            Self::Blk(blk) => value(&**blk),
            Self::Net(net) => value(&**net),
        };
        keys.insert("kind".to_owned(), self.kind().into());
        keys
    }
}

impl Plan {
    /// Returns the running switch with the name of `then`. With `is_live`, only if it can become
    /// `then` while the daemon runs; without, only if it cannot. A switch that the daemon serves
    /// itself is made at the start, and only a switch of a device process can change.
    fn switch_now(&self, then: &SwitchPlan, is_live: bool) -> Option<&SwitchPlan> {
        let now = self.switch.iter().find(|now| now.name == then.name)?;
        ((self.daemon.domains != Domains::One) == is_live).then_some(now)
    }

    /// Replaces each switch that cannot change while the daemon runs by that of the running plan.
    pub fn keep_switches(&mut self, running: &Self) {
        for then in &mut self.switch {
            if let Some(now) = running.switch_now(then, false) {
                then.clone_from(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    /// The devices of a plan with their keys, sorted by name.
    fn said(plan: &Plan) -> Vec<(String, Value)> {
        let mut all: Vec<_> = plan
            .wanted()
            .map(|device| (device.plan().name.clone(), Value::Object(device.keys())))
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    fn apply(mut plan: Plan, steps: &[Step]) -> Plan {
        for step in steps {
            plan = match &step.what {
                What::Add(device) | What::Change(device, ..) => plan.with(device),
                What::Remove => plan.without(|device| device.name == step.name),
                What::AddSwitch(_)
                | What::ChangeSwitch(..)
                | What::RemoveSwitch
                | What::Limits(_)
                | What::NeedsRestart(_) => plan,
            };
        }
        plan
    }

    /// A plan of some of eight devices, with values that `seed` chooses (xorshift).
    fn some_plan(seed: &mut u64) -> Plan {
        let mut next = |n: u64| {
            *seed ^= *seed << 13;
            *seed ^= *seed >> 7;
            *seed ^= *seed << 17;
            *seed % n
        };
        let mut text = String::from("[daemon]\ncontrol = '/c'\n");
        for index in 0..8 {
            let (is_there, kind) = (next(3) > 0, next(2));
            let (queues, size) = (1 + next(3), 1 + next(3));
            if !is_there {
                continue;
            }
            let head = format!("name = 'd{index}'\nsocket_path = '/s{index}'\n");
            text += &match kind {
                0 => format!("[[blk]]\n{head}null = '{size}G'\nnum_queues = {queues}\n"),
                _ => format!("[[net]]\n{head}null = true\nqueue_pairs = {queues}\n"),
            };
        }
        parse(&text).unwrap()
    }

    #[test]
    fn the_steps_of_a_difference_make_the_running_plan_the_desired_one() {
        let mut seed = 0x9e37_79b9_7f4a_7c15;
        for round in 0..300 {
            let (a, b) = (some_plan(&mut seed), some_plan(&mut seed));
            let steps = diff(&a, &b);
            assert_eq!(said(&apply(a, &steps)), said(&b), "round {round}");
            assert!(diff(&b, &b.clone()).is_empty());
        }
    }

    #[test]
    fn a_changed_key_is_named_as_it_is_written() {
        let plan = |more: &str| {
            parse(&format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\nnull = '1G'\n{more}")).unwrap()
        };
        for (more, key, step) in [
            ("num_queues = 2", "num_queues", "reconnect"),
            ("cache = 'writethrough'", "cache", "reconnect"),
            ("read_only = true", "read_only", "reconnect"),
            ("socket_mode = '0600'", "socket_path", "replace"),
        ] {
            let steps: Vec<_> = diff(&plan(""), &plan(more)).iter().map(Step::info).collect();
            let keys = vec![key.to_owned()];
            assert_eq!(steps, [StepInfo { device: "a".into(), step: step.into(), keys }], "{more}");
        }
        let switches =
            |text: &str| parse(&format!("{text}[[net]]\nsocket_path = '/s'\nnull = true")).unwrap();
        let (s0, s1) = ("[[switch]]\nname = 's0'\n", "[[switch]]\nname = 's1'\nuplink = 't'\n");
        let both = format!("{s0}{s1}");
        let told = |a: &str, b: &str| -> Vec<_> {
            let steps = diff(&switches(a), &switches(b));
            steps
                .iter()
                .map(|step| (step.name.clone(), step.info().step, step.info().keys))
                .collect()
        };
        let none = Vec::<String>::new;
        assert_eq!(told(s0, &both), [("s1".to_owned(), "add".to_owned(), none())]);
        assert_eq!(told(&both, s1), [("s0".to_owned(), "remove".to_owned(), none())]);
        let older = format!("{s0}age = 7\n");
        let keys = vec!["age".to_owned()];
        assert_eq!(told(s0, &older), [("s0".to_owned(), "live".to_owned(), keys.clone())]);
        // One that the daemon serves itself, with `domains = 'one'`, is made at its start.
        for (a, b) in [
            ("[daemon]\ndomains = 'one'\n", "[daemon]\ndomains = 'one'\n"),
            ("uplink = 't'\nuplink_kind = 'xdp'\n", "uplink = 't'\nuplink_kind = 'xdp'\n"),
            ("uplink = 't'\nuplink_kind = 'xdp'\n", "uplink = 't'\n"),
            ("uplink = 't'\n", "uplink = 't'\nuplink_kind = 'xdp'\n"),
        ] {
            let [a, b] = [format!("{s0}{a}"), format!("{s0}age = 7\n{b}")];
            let (keys, step) = (told(&a, &b), if a.contains("one") { "restart" } else { "live" });
            assert!(keys.len() == 1 && keys[0].1 == step && keys[0].2[0] == "age", "{keys:?}");
            // A port that comes is served where the others are.
            let port = "[[net]]\nname = 'p'\nsocket_path = '/p'\nswitch = 's0'\n";
            let (now, then) = (switches(&a), switches(&format!("{b}{port}")));
            let where_of = |plan: &Plan, device: &Wanted| device.domain(plan.daemon.domains);
            let steps = diff(&now, &then);
            let added = |step: &Step| match &step.what {
                What::Add(device) if step.name == "p" => Some(device.clone()),
                _ => None,
            };
            let device = steps.iter().find_map(added).unwrap();
            let same = switches(&format!("{a}{port}"));
            let other = same.device("p").unwrap();
            assert_eq!(where_of(&now, &device), where_of(&now, &other), "{b}");
        }
        let restart = "[daemon]\nworkers = 3\n";
        let text = "[[blk]]\nname = 'a'\nsocket_path = '/s'\nnull = '1G'\n";
        let steps = diff(&parse(text).unwrap(), &parse(&format!("{restart}{text}")).unwrap());
        let info = steps[0].info();
        assert_eq!((info.step.as_str(), info.keys), ("restart", vec!["workers".to_owned()]));
    }
}
