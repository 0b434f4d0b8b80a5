//! Random domains: requests of a hostile one, and transactions beside a tree in plain words.

use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn bytes_of_a_hostile_domain_spoil_nothing_of_others(
        messages in prop::collection::vec(
            (0..30_u32, 0..3_u32, "[/a@-]{0,9}", prop::collection::vec(any::<u8>(), 0..20)),
            1..60,
        ),
    ) {
        let mut bed = bed();
        bed.store.introduce(5);
        let (dom0, hostile) = (bed.store.connect(None), bed.store.connect(Some(5)));
        bed.write(dom0, "/a/theirs", "1").unwrap();
        bed.watch(dom0, "/a", "t").unwrap();
        bed.events(dom0);
        for (kind, tx_id, at, rest) in messages {
            let payload = [at.as_bytes(), b"\0", &rest].concat();
            let size = u32::try_from(payload.len()).unwrap();
            let header = StoreHeader { kind, req_id: 1, tx_id, size }.emit();
            bed.store.receive(hostile, &mut [&header[..], &payload].concat());
            bed.store.output(hostile).unwrap().clear();
        }
        prop_assert!(bed.store.tree().is_counted());
        prop_assert_eq!(bed.read(dom0, "/a/theirs").unwrap(), "1");
        prop_assert!(bed.events(dom0).is_empty() && !bed.store.is_over(dom0));
    }
}

/// The tree in plain words: every path and its value.
#[derive(Clone, Debug, Default)]
struct Twin(BTreeMap<String, String>);

impl Twin {
    fn new() -> Self {
        Self(BTreeMap::from([("/".to_owned(), String::new())]))
    }

    fn parents(at: &str) -> impl Iterator<Item = String> {
        std::iter::successors(path(at).parent(), |path| path.parent())
            .map(|path| path.as_str().to_owned())
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn make_parents(&mut self, at: &str) {
        for parent in Self::parents(at) {
            self.0.entry(parent).or_default();
        }
    }

    /// Answers a request, and makes its changes.
    fn ask(&mut self, act: &Act) -> Served {
        let ok = ok();
        match act {
            Act::Read(at) => {
                self.0.get(at).map(|value| value.clone().into_bytes()).ok_or(ErrorName::Enoent)
            }
            Act::List(at) => {
                self.0.get(at).ok_or(ErrorName::Enoent)?;
                let is_child = |child: &&String| path(child).parent() == Some(path(at));
                let names = self.0.keys().filter(is_child).map(|child| path(child).name());
                let mut names: Vec<_> = names.collect();
                names.sort_unstable();
                Ok(names.iter().flat_map(|name| format!("{name}\0").into_bytes()).collect())
            }
            Act::Write(at, value) => {
                self.make_parents(at);
                self.0.insert(at.clone(), value.clone());
                ok
            }
            Act::Mkdir(at) => {
                self.make_parents(at);
                self.0.entry(at.clone()).or_default();
                ok
            }
            Act::Rm(at) => {
                let parent = Self::parents(at).next().ok_or(ErrorName::Einval)?;
                self.0.get(&parent).ok_or(ErrorName::Enoent)?;
                self.0.retain(|other, _| path(other).depth_below(path(at)).is_none());
                ok
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Read(String),
    List(String),
    Write(String, String),
    Mkdir(String),
    Rm(String),
}

impl Act {
    fn request(&self) -> Request<'_> {
        match self {
            Self::Read(at) => Request::Read(path(at)),
            Self::List(at) => Request::Directory(path(at)),
            Self::Write(at, value) => Request::Write { path: path(at), value: value.as_bytes() },
            Self::Mkdir(at) => Request::Mkdir(path(at)),
            Self::Rm(at) => Request::Rm(path(at)),
        }
    }
}

/// A step of one of three clients: a request outside of a transaction, or in its own; its beginning
/// and its end.
#[derive(Clone, Debug)]
enum Step {
    Outside(usize, Act),
    Inside(usize, Act),
    Begin(usize),
    End(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let place = || prop::collection::vec(prop::sample::select(vec!["a", "b"]), 1..4);
    let at = move || place().prop_map(|names| format!("/{}", names.join("/")));
    let act = move || {
        prop_oneof![
            at().prop_map(Act::Read),
            at().prop_map(Act::List),
            (at(), "[x-z]{0,2}").prop_map(|(at, value)| Act::Write(at, value)),
            at().prop_map(Act::Mkdir),
            at().prop_map(Act::Rm),
        ]
    };
    prop_oneof![
        2 => (0..3_usize, act()).prop_map(|(client, act)| Step::Outside(client, act)),
        5 => (0..3_usize, act()).prop_map(|(client, act)| Step::Inside(client, act)),
        1 => (0..3_usize).prop_map(Step::Begin),
        1 => (0..3_usize, prop::bool::weighted(0.8)).prop_map(|(c, commit)| Step::End(c, commit)),
    ]
}

/// A transaction as its client knows it.
struct Open {
    number: u32,
    /// Its requests and their answers.
    log: Vec<(Act, Served)>,
    /// How many changes others had made when it began.
    changes: usize,
}

proptest! {
    /// A transaction that is committed might as well have run at that moment, all at once: every
    /// answer that it was given is the one that it would be given then. One during which nobody
    /// changed anything is committed.
    #[test]
    fn transactions_are_as_if_they_ran_one_after_the_other(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut bed = bed();
        let clients = [(); 3].map(|()| bed.store.connect(None));
        let mut open: [Option<Open>; 3] = [None, None, None];
        let (mut twin, mut changes) = (Twin::new(), 0);
        for step in steps {
            match step {
                Step::Outside(client, act) => {
                    let answer = bed.ask(clients[client], &act.request());
                    prop_assert_eq!(answer, twin.ask(&act));
                    changes += usize::from(!matches!(act, Act::Read(_) | Act::List(_)));
                }
                Step::Inside(client, act) => {
                    let Some(open) = &mut open[client] else { continue };
                    let answer = bed.ask_in(clients[client], open.number, &act.request());
                    open.log.push((act, answer));
                }
                Step::Begin(client) if open[client].is_none() => {
                    let number = bed.begin(clients[client]);
                    open[client] = Some(Open { number, log: Vec::new(), changes });
                }
                Step::Begin(_) => {}
                Step::End(client, commit) => {
                    let Some(ended) = open[client].take() else { continue };
                    let Open { number, log, changes: before } = ended;
                    let end = Request::TransactionEnd { commit };
                    let answer = bed.ask_in(clients[client], number, &end);
                    if before == changes || !commit {
                        prop_assert!(answer.is_ok());
                    }
                    if commit && answer.is_ok() {
                        for (act, answer) in log {
                            prop_assert_eq!(answer, twin.ask(&act), "{:?}", act);
                        }
                        changes += 1;
                    } else if commit {
                        prop_assert_eq!(answer, Err(ErrorName::Eagain));
                    }
                }
            }
            prop_assert!(bed.store.tree().is_counted());
        }
        for (at, value) in &twin.0 {
            let read = bed.read(clients[0], at);
            prop_assert_eq!(read.as_ref(), Ok(value));
        }
    }
}
