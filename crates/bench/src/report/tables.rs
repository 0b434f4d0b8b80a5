//! The tables of a run, for its page and for a terminal: a scenario's own, and those of the
//! references that stand beside it.

use super::columns::{self, ColumnHead, KNOWN};
use super::compare::number;
use super::document::{CellDocument, PartyDocument, ScenarioDocument};
use super::html::{Table, Td};
use super::references::ReferenceTable;
use super::{Distance, Spread, references};
use serde_json::{Map, Value};

/// The throughput of several queue pairs against one, beside that of the references' queues; empty
/// if no party repeats a cell of theirs.
pub(super) fn geomeans(scenario: &ScenarioDocument) -> String {
    let mut found: Vec<(&str, Vec<f64>)> = Vec::new();
    for cell in &scenario.report.cells {
        let reference =
            |party: &PartyDocument| references::multiqueue_tap(&scenario.name, cell, &party.name);
        let one = cell.parties.iter().find(|party| reference(party).is_some_and(|r| r.pairs == 1));
        let Some(one) = one.and_then(|party| party.spread("throughput")) else { continue };
        for party in &cell.parties {
            let Some(reference) = reference(party).filter(|reference| reference.pairs > 1) else {
                continue;
            };
            let ratio = party.spread("throughput").map(|many| many.median / one.median);
            match found.iter_mut().find(|(name, _)| *name == reference.cell.scenario) {
                Some((_, ratios)) => ratios.extend(ratio),
                None => found.push((reference.cell.scenario, ratio.into_iter().collect())),
            }
        }
    }
    if found.is_empty() {
        return String::new();
    }
    let heads = [Td::word("several queues to one, throughput"), Td::number("geometric mean")];
    let heads = heads.into_iter().chain([Td::number("worst cell")]);
    let mut table = Table::new(heads.chain([Td::word("reference").class("ref")]).collect());
    for (name, ratios) in found {
        let (way, size) = name.split_once('_').unwrap_or((name, ""));
        let way = if way == "local2g" { "host to guest" } else { "guest to host" };
        let size = if size == "512" { "messages of 512 B" } else { "messages of default size" };
        let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = references::geomean(ratios.into_iter());
        let ours = [mean, worst].map(|ratio| Td::number(format!("{ratio:.2}x")));
        let theirs = format!("{:.2}x", references::geomean_of(name));
        let row = [Td::word(format!("{way}, {size}"))].into_iter().chain(ours);
        table.row(row.chain([Td::word(theirs).class("ref")]));
    }
    format!("<h3>Whether more queues ever cost something</h3>\n{}", table.html())
}

/// A table of a reference, as it is.
pub(super) fn of_reference(beside: &ReferenceTable) -> Table {
    let cells = |row: &[&str]| -> Vec<Td> {
        let words = row.iter().take(1).map(|word| Td::word(*word));
        words.chain(row.iter().skip(1).map(|number| Td::number(*number))).collect()
    };
    let mut table = Table::new(cells(beside.heads));
    beside.rows.iter().for_each(|row| table.row(cells(row)));
    table
}

/// The table of a scenario: `party | sessions | throughput | cpu | normalized`, what else there is,
/// and the references' columns where a party repeats one of their cells.
pub(super) fn of(scenario: &ScenarioDocument) -> Table {
    let cells = &scenario.report.cells;
    let heads = columns::of_cells(cells);
    let has_sessions = cells.iter().any(|cell| cell.sessions.is_some());
    let reference = |cell: &CellDocument, party: &PartyDocument| {
        references::beside_party(&scenario.name, cell, &party.name)
    };
    let mut all = cells.iter().flat_map(|cell| cell.parties.iter().map(move |party| (cell, party)));
    let of_reference = all.find_map(|(cell, party)| reference(cell, party));
    let of_reference = of_reference.map_or(&[][..], |columns| columns.heads);
    let mut first = vec![Td::word("party")];
    first.extend(has_sessions.then(|| Td::number("sessions")));
    first.extend(heads.iter().map(|head| Td::number(head.text()).titled(about(head))));
    first.extend(of_reference.iter().map(|head| Td::word(*head).class("ref")));
    let mut table = Table::new(first);
    for cell in cells {
        let unit = cell.unit.as_ref().map_or(String::new(), |unit| format!(" ({unit})"));
        table.group(&format!("{}{unit}", cell.name), &scenario.command_of(cell));
        for party in &cell.parties {
            let mut row = vec![Td::word(&party.name)];
            if has_sessions {
                row.push(Td::number(cell.sessions.map_or(String::new(), |n| n.to_string())));
            }
            row.extend(heads.iter().map(|head| figure(party, head)));
            match reference(cell, party) {
                Some(columns) => row.extend(
                    columns
                        .figures
                        .iter()
                        .map(|figure| Td::word(number(*figure)).class("ref").titled(&columns.cell)),
                ),
                None => row.extend(of_reference.iter().map(|_| Td::word("").class("ref"))),
            }
            table.row(row);
        }
        for ratios in &cell.against {
            against(cell, ratios).iter().for_each(|line| table.note(line, ""));
            distances(ratios).iter().for_each(|line| table.note(line, ""));
        }
        let disturbed: usize = cell.parties.iter().map(PartyDocument::disturbed).sum();
        if disturbed > 0 {
            let all: usize = cell.parties.iter().map(|party| party.samples.len()).sum();
            let line =
                format!("other programs disturbed {disturbed} of {all} runs: do not use them");
            table.note(&line, "bad");
        }
    }
    table
}

fn about(head: &ColumnHead) -> String {
    match head {
        ColumnHead::Known(column) => column.about.to_owned(),
        ColumnHead::Other(_) => String::new(),
    }
}

fn figure(party: &PartyDocument, head: &ColumnHead) -> Td {
    let Some(spread) = party.spread(head.key()) else { return Td::word("") };
    let Spread { median, min, max } = spread;
    let title = format!("{} to {} in {} rounds", number(min), number(max), party.samples.len());
    Td::number(number(median)).titled(title)
}

/// `manyring against fio: IOPS 1.94x (1.81 to 2.09), ..`: all ratios of one pair.
fn against(cell: &CellDocument, ratios: &Map<String, Value>) -> Option<String> {
    let text = |key: &str| ratios.get(key).and_then(Value::as_str);
    let first = cell.parties.first().map(|party| party.name.as_str());
    let (party, peer) = (text("party").or(first)?, text("peer")?);
    let of = |name: &str, spread: &Value| {
        let number = |key: &str| spread.get(key).and_then(Value::as_f64);
        let spread = Spread { median: number("median")?, min: number("min")?, max: number("max")? };
        let known = KNOWN.iter().find(|column| column.key == name);
        let name = known.map_or_else(|| name.replace('_', " "), |column| column.head.to_owned());
        (spread.median > 0.0).then(|| format!("{name} {spread}"))
    };
    let mut named: Vec<(&String, &Value)> = ratios.iter().collect();
    // Throughput stands before CPU time.
    named.sort_by_key(|(name, _)| (name.contains("cpu"), name.len()));
    let ratios: Vec<String> =
        named.into_iter().filter_map(|(name, value)| of(name, value)).collect();
    (!ratios.is_empty()).then(|| format!("{party} against {peer}: {}", ratios.join(", ")))
}

/// The ratios by distance of the CPUs, if there was more than one.
fn distances(ratios: &Map<String, Value>) -> Option<String> {
    let all: Vec<Distance> = serde_json::from_value(ratios.get("by_distance")?.clone()).ok()?;
    let words: Vec<String> = all.iter().map(ToString::to_string).collect();
    (words.len() > 1).then(|| format!("by distance of the CPUs: {}", words.join(", ")))
}

#[cfg(test)]
mod tests;
