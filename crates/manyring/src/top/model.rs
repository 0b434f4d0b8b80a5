//! The contents of the screen, and the effect of each key on them. This module does not use the
//! terminal.

use super::columns::{Row, View, losses, rows};
use super::units::{rate, size};
use crate::stats::Shown;
use crate::stats::table::seen;
use manyring_control::snapshot::{Detail, DeviceInfo, as_float};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use tokio::time::Instant;

/// The most characters of a filter.
const FILTER_MAX: usize = 40;

/// A key's effect on the program: continue, or end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Stay,
    Leave,
}

/// The contents of the screen, and what the user has chosen.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) control: String,
    pub(super) view: View,
    /// The column by which the rows are sorted, for each view.
    sort: [usize; 3],
    reversed: bool,
    pub(super) filter: String,
    /// True while the user types a filter: keys are appended to it.
    pub(super) is_typing: bool,
    pub(super) is_paused: bool,
    pub(super) is_help: bool,
    /// The key of the chosen row. If no row has that key, the first row is chosen.
    chosen: Option<String>,
    /// The number of rows on the screen, set by the last drawing.
    pub(super) page: usize,
    now: Option<(Shown, Instant)>,
    before: Option<(Shown, Instant)>,
    /// The error of the last request to the daemon; `None`: the daemon answered.
    pub(super) problem: Option<String>,
}

impl Model {
    pub(super) fn new(control: String) -> Self {
        Self {
            control,
            view: View::Devices,
            sort: [0; 3],
            reversed: false,
            filter: String::new(),
            is_typing: false,
            is_paused: false,
            is_help: false,
            chosen: None,
            page: 10,
            now: None,
            before: None,
            problem: None,
        }
    }

    /// Takes an answer of the daemon, or the error. While the display is paused, the numbers are
    /// not replaced.
    pub(super) fn take(&mut self, answer: Result<Shown, String>, at: Instant) {
        match answer {
            Err(problem) => self.problem = Some(problem),
            Ok(shown) => {
                self.problem = None;
                if !self.is_paused || self.now.is_none() {
                    self.before = self.now.replace((shown, at));
                }
            }
        }
    }

    /// Returns the rows of the table, sorted and filtered.
    pub(super) fn rows(&self) -> Vec<Row> {
        let Some((now, _)) = &self.now else { return Vec::new() };
        let mut rows = rows(self.view, now, self.since());
        rows.retain(|row| row.key.contains(&self.filter));
        let column = self.sorted_by();
        rows.sort_by(|a, b| {
            let order = a.cells[column].order(&b.cells[column]);
            let order = if self.reversed { order.reverse() } else { order };
            order.then_with(|| a.key.cmp(&b.key))
        });
        rows
    }

    fn since(&self) -> Option<(&Shown, f64)> {
        let ((_, now), (old, then)) = (self.now.as_ref()?, self.before.as_ref()?);
        Some((old, (*now - *then).as_secs_f64().max(0.001)))
    }

    pub(super) fn sorted_by(&self) -> usize {
        self.sort[self.place()]
    }

    pub(super) fn is_reversed(&self) -> bool {
        self.reversed
    }

    fn place(&self) -> usize {
        View::ALL.iter().position(|view| *view == self.view).unwrap_or(0)
    }

    /// Returns the index of the chosen row.
    pub(super) fn chosen(&self, rows: &[Row]) -> usize {
        let is_chosen = |row: &Row| Some(&row.key) == self.chosen.as_ref();
        rows.iter().position(is_chosen).unwrap_or(0)
    }

    /// Returns one line: the numbers of devices and workers, and the sums of their rates.
    pub(super) fn summary(&self) -> String {
        let Some((now, _)) = &self.now else { return "no answer yet".to_owned() };
        let all = now.devices.len();
        let connected = now.devices.iter().filter(|device| device.connected).count();
        let bad = now.devices.iter().filter(|device| device.state != "serving").count();
        let running = now.workers.iter().filter(|worker| worker.running).count();
        let mut sums = [0.0; 3];
        for row in rows(View::Devices, now, self.since()) {
            for (sum, cell) in sums.iter_mut().zip(&row.cells[3..6]) {
                if let super::columns::Cell::Number(value, _) = cell {
                    *sum += value;
                }
            }
        }
        let [operations, to_guests, from_guests] = sums.map(rate);
        let waiting = if bad > 0 { format!(", {bad} not served") } else { String::new() };
        format!(
            "{}, {connected} connected{waiting}; {}; {operations} ops/s, in {to_guests}, \
             out {from_guests}",
            several(all, "device"),
            several(running, "worker"),
        )
    }

    /// Returns the alarm line: the daemon does not answer, or a thread is stuck (the first one is
    /// named); `None`: neither.
    pub(super) fn alarm(&self) -> Option<String> {
        if let Some(problem) = &self.problem {
            return Some(problem.clone());
        }
        let stuck = &self.now.as_ref()?.0.stuck;
        let first = stuck.first()?;
        let device = if first.device.is_empty() { "several devices" } else { &first.device };
        let seconds = as_float(first.stuck_ns) / 1e9;
        let more = if stuck.len() > 1 {
            format!(" (and {} more)", stuck.len() - 1)
        } else {
            String::new()
        };
        Some(format!(
            "{}: stuck for {seconds:.1} s by {device}, in {}{more}",
            first.name(),
            first.waits_in
        ))
    }

    /// Returns the lines that describe the device of the chosen row.
    pub(super) fn details(&self, rows: &[Row]) -> Vec<String> {
        let chosen = rows.get(self.chosen(rows));
        let name = chosen.and_then(|row| row.device.as_ref());
        let all = self.now.iter().flat_map(|(now, _)| &now.devices);
        let Some(device) = all.into_iter().find(|device| Some(&device.name) == name) else {
            return Vec::new();
        };
        let mut lines = vec![what_it_is(device), format!("socket {}", device.socket)];
        if let Some(reason) = &device.reason {
            lines.push(format!("{}: {reason}", device.state));
        }
        if !device.pending_keys.is_empty() {
            lines.push(format!("from the next session on: {}", device.pending_keys.join(", ")));
        }
        let old = self.since().map(|(old, seconds)| (&old.devices[..], seconds));
        let unit = if old.is_some() { "/s" } else { " since the start" };
        let mut causes = std::collections::BTreeMap::<String, f64>::new();
        for queue in seen(device, old) {
            for (name, scaled) in losses(&queue) {
                let cause = name.trim_start_matches("dropped_").replace('_', " ");
                *causes.entry(cause).or_default() += scaled;
            }
        }
        if !causes.is_empty() {
            let all: Vec<_> =
                causes.iter().map(|(cause, n)| format!("{} {cause}", rate(*n))).collect();
            lines.push(format!("lost{unit}: {}", all.join(", ")));
        }
        lines
    }

    /// Changes the model as the key demands. The result says whether the program continues.
    pub(super) fn press(&mut self, key: KeyEvent) -> Wish {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            return Wish::Leave;
        }
        if self.is_typing {
            self.type_filter(key.code);
            return Wish::Stay;
        }
        match key.code {
            KeyCode::Char('q') => return Wish::Leave,
            KeyCode::Char('?' | 'h') => self.is_help = !self.is_help,
            KeyCode::Esc if self.is_help => self.is_help = false,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('s' | '>') | KeyCode::Right => self.sort_next(1),
            KeyCode::Char('S' | '<') | KeyCode::Left => {
                self.sort_next(self.view.columns().len() - 1);
            }
            KeyCode::Char('1') => self.view = View::Devices,
            KeyCode::Char('2') => self.view = View::Queues,
            KeyCode::Char('3') => self.view = View::Workers,
            KeyCode::Tab => self.view = View::ALL[(self.place() + 1) % View::ALL.len()],
            KeyCode::BackTab => self.view = View::ALL[(self.place() + 2) % View::ALL.len()],
            KeyCode::Enter => self.open(),
            KeyCode::Up | KeyCode::Char('k') => self.go(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.go(|at, _| at + 1),
            KeyCode::PageUp => self.go(|at, page| at.saturating_sub(page)),
            KeyCode::PageDown => self.go(|at, page| at + page),
            KeyCode::Home => self.go(|_, _| 0),
            KeyCode::End => self.go(|_, _| usize::MAX),
            _ => {}
        }
        Wish::Stay
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) if self.filter.chars().count() < FILTER_MAX => self.filter.push(c),
            _ => {}
        }
    }

    fn sort_next(&mut self, step: usize) {
        let place = self.place();
        self.sort[place] = (self.sort[place] + step) % self.view.columns().len();
    }

    /// Shows the queues of the chosen device.
    fn open(&mut self) {
        let rows = self.rows();
        if let (View::Devices, Some(row)) = (self.view, rows.get(self.chosen(&rows))) {
            self.filter.clone_from(&row.key);
            self.view = View::Queues;
        }
    }

    fn go(&mut self, to: impl FnOnce(usize, usize) -> usize) {
        let rows = self.rows();
        let at = to(self.chosen(&rows), self.page).min(rows.len().saturating_sub(1));
        self.chosen = rows.get(at).map(|row| row.key.clone());
    }
}

/// Returns a number with its noun, like `1 queue` or `2 queues`.
fn several(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns one line that describes a device: name, kind, origin and so on.
fn what_it_is(device: &DeviceInfo) -> String {
    let DeviceInfo { name, kind, origin, .. } = device;
    let detail = match &device.detail {
        Detail::Blk { disk, size: bytes, read_only, logical_block_size, .. } => {
            let access = if *read_only { ", read only" } else { "" };
            format!("{disk}, {}, sectors of {logical_block_size}{access}", size(as_float(*bytes)))
        }
        Detail::Net {
            port, interface, mac, link, queue_pairs, txqueuelen, receive_pairs, ..
        } => {
            let interface = interface.as_deref().unwrap_or("no interface");
            let length = txqueuelen.as_ref().map_or_else(String::new, |length| {
                format!(", txqueuelen {} ({})", length.frames, length.source)
            });
            let receives = receive_pairs.as_ref().map_or_else(String::new, |receives| {
                format!(", receives by {} ({})", receives.pairs, receives.source)
            });
            let pairs = format!("{queue_pairs} queue pairs{receives}{length}");
            format!("{port} {interface}, {mac}, link {link}, {pairs}")
        }
        Detail::Waiting {} => "not served".to_owned(),
    };
    let process = device
        .process
        .as_ref()
        .map(|process| format!(", in device process {process}"))
        .unwrap_or_default();
    format!("{name} ({kind}, from {origin}{process}): {detail}")
}
