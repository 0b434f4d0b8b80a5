//! Which plots a scenario has: found in the names of its cells and parties, so that a new scenario
//! needs no word here.
//!
//! Cells whose names differ in a number only make lines over that number (`QD#`, `# streams`);
//! so do parties (`manyring, # pairs`). A cell that is alone makes a bar for each party. Where the
//! references have figures, their lines are dashed, in the colours of ours.

use super::document::{CellDocument, NORMALIZED, PartyDocument, ScenarioDocument, TO_ONE};
use super::plot::{Kind, Plot, Series};
use super::{Spread, columns, ratio, references};
use std::collections::BTreeMap;

/// All plots of a scenario.
pub(crate) fn of(scenario: &ScenarioDocument) -> Vec<Plot> {
    let mut plots = Vec::new();
    for family in families(&scenario.report.cells) {
        let (cell, is_alone) = (family.cells[0].1, family.cells.len() < 2);
        for field in fields(cell) {
            plots.extend(by_cells(&scenario.name, &family, &field));
            // Ratios are shown once, over whatever changes from cell to cell.
            if is_alone || !field.is_ratio() {
                plots.extend(by_parties(&scenario.name, &family, &field));
            }
        }
        if is_alone && numbered_parties(cell).is_none() {
            plots.extend(fields(cell).iter().filter_map(|field| bars(cell, field)));
        }
    }
    plots
}

/// The histogram of each cell whose samples have one.
pub(crate) fn latencies(scenario: &ScenarioDocument) -> Vec<Plot> {
    scenario.report.cells.iter().filter_map(histogram).collect()
}

/// A field that a plot shows of a cell, with its name for people.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PlotField {
    key: String,
    head: String,
}

impl PlotField {
    fn is_ratio(&self) -> bool {
        [NORMALIZED, TO_ONE].contains(&self.key.as_str())
    }

    /// The values of a party; [`TO_ONE`] is that of the rounds.
    fn spread(&self, cell: &CellDocument, party: &PartyDocument) -> Option<Spread> {
        if self.key != TO_ONE {
            return party.spread(&self.key);
        }
        let main = columns::main_of(cell)?;
        let (_, parties) = numbered_parties(cell)?;
        let (_, one) = parties.iter().find(|(count, _)| (count - 1.0).abs() < 1e-9)?;
        let (ours, ones) = (party.rounds(main.key()), one.rounds(main.key()));
        let ratios: Vec<f64> = ours.iter().zip(&ones).map(|(a, b)| ratio(*a, *b)).collect();
        (!ratios.is_empty()).then(|| Spread::of(ratios))
    }
}

/// The main field of a cell, that of its CPU time, both in one, and the ratio to one queue.
fn fields(cell: &CellDocument) -> Vec<PlotField> {
    let heads = columns::of_cells([cell]);
    let main = columns::main_of(cell);
    let others =
        heads.iter().filter(|head| ["cpu", "cpu_per_million", NORMALIZED].contains(&head.key()));
    let named = |head: &columns::ColumnHead| {
        let unit = cell.unit.clone().filter(|_| head.key() == "throughput");
        PlotField { key: head.key().to_owned(), head: unit.unwrap_or_else(|| head.text()) }
    };
    let axis = numbered_parties(cell).map(|(template, _)| template.axis(0));
    let is_of_queues = axis.is_some_and(|axis| ["pairs", "queues"].contains(&&*axis));
    let to_one = PlotField { key: TO_ONE.to_owned(), head: "ratio to one queue".to_owned() };
    main.iter().chain(others).map(named).chain(is_of_queues.then_some(to_one)).collect()
}

/// A name with its numbers taken out: `QD#, client polls`.
#[derive(Clone, Debug, PartialEq)]
struct Template {
    /// With a `#` for each number.
    text: String,
    /// The text with every counted word in the singular, so that `1 queue` and `2 queues` agree.
    kind: String,
    numbers: Vec<f64>,
}

impl Template {
    fn of(name: &str) -> Self {
        let (mut text, mut numbers, mut digits) = (String::new(), Vec::new(), String::new());
        for c in name.chars().chain(['\0']) {
            if c.is_ascii_digit() {
                digits.push(c);
                continue;
            }
            if let Ok(number) = digits.parse::<f64>() {
                text.push('#');
                numbers.push(number);
            }
            digits.clear();
            text.extend((c != '\0').then_some(c));
        }
        Self { kind: singular(&text), text, numbers }
    }

    /// The name again, with dots in the place of one number.
    fn title(&self, position: usize) -> String {
        let mut numbers = self.numbers.iter().enumerate();
        let mut title = String::new();
        for c in self.text.chars() {
            match c {
                '#' => match numbers.next() {
                    Some((at, _)) if at == position => title.push('…'),
                    Some((_, number)) => title.push_str(&number.to_string()),
                    None => {}
                },
                _ => title.push(c),
            }
        }
        title
    }

    /// The other numbers.
    fn without(&self, position: usize) -> Vec<f64> {
        let others = self.numbers.iter().enumerate().filter(|(at, _)| *at != position);
        others.map(|(_, number)| *number).collect()
    }

    /// The unit of a number: the word before it if they touch, else the words behind it.
    fn axis(&self, position: usize) -> String {
        let at = self.text.match_indices('#').nth(position).map_or(0, |(at, _)| at);
        let before: String =
            self.text[..at].chars().rev().take_while(|c| c.is_alphabetic()).collect();
        if !before.is_empty() {
            return in_words(&before.chars().rev().collect::<String>());
        }
        let behind = &self.text[(at + 1).min(self.text.len())..];
        let words = behind.trim_start().split([',', '#', ';']).next().unwrap_or_default();
        in_words(words.split(" by ").next().unwrap_or_default().trim())
    }
}

/// The words at an axis for an abbreviation in a name.
fn in_words(word: &str) -> String {
    let words = match word {
        "QD" => "requests in flight",
        "B" => "bytes",
        word => word,
    };
    words.to_owned()
}

/// `# devices` and `# device` are the same: the word behind a number without its last s.
fn singular(text: &str) -> String {
    let mut words: Vec<String> = text.split(' ').map(str::to_owned).collect();
    for index in 1..words.len() {
        if words[index - 1].ends_with('#') {
            let end = words[index].trim_end_matches([',', ';']).len();
            let (word, rest) = words[index].split_at(end);
            if let Some(one) = word.strip_suffix('s').filter(|one| one.len() > 2) {
                words[index] = format!("{one}{rest}");
            }
        }
    }
    words.join(" ")
}

/// Cells whose names differ in one number, or a single cell.
struct Family<'a> {
    /// Which number differs, if there are several cells.
    position: usize,
    /// The number and its cell, in order.
    cells: Vec<(f64, &'a CellDocument)>,
    template: Template,
}

fn families(cells: &[CellDocument]) -> Vec<Family<'_>> {
    let mut same: Vec<(String, Vec<(Template, &CellDocument)>)> = Vec::new();
    for cell in cells {
        let template = Template::of(&cell.name);
        match same.iter_mut().find(|(kind, _)| *kind == template.kind) {
            Some((_, group)) => group.push((template, cell)),
            None => same.push((template.kind.clone(), vec![(template, cell)])),
        }
    }
    same.into_iter().flat_map(|(_, group)| split(group)).collect()
}

/// Splits cells of one template into families in which one number differs: that with most values.
fn split(group: Vec<(Template, &CellDocument)>) -> Vec<Family<'_>> {
    let places = group.first().map_or(0, |(template, _)| template.numbers.len());
    let values = |position: usize| {
        let mut values: Vec<f64> = group.iter().map(|(t, _)| t.numbers[position]).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values.len()
    };
    let position = (0..places).max_by_key(|position| values(*position)).unwrap_or(0);
    let mut families: Vec<Family<'_>> = Vec::new();
    for (template, cell) in group {
        let number = template.numbers.get(position).copied().unwrap_or(0.0);
        let others = template.without(position);
        match families.iter_mut().find(|family| family.template.without(position) == others) {
            Some(family) => {
                family.cells.push((number, cell));
                // Of `1 device` and `10 devices` the second is the name of all.
                if number > 1.0 {
                    family.template = template;
                }
            }
            None => families.push(Family { position, cells: vec![(number, cell)], template }),
        }
    }
    for family in &mut families {
        family.cells.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    }
    families
}

/// Lines over some number, and the lines of references that belong to each.
#[derive(Default)]
struct Lines(Vec<Series>);

impl Lines {
    /// A point of a party, on the line of this name, and what the references have there.
    fn add(
        &mut self,
        (scenario, field): (&str, &PlotField),
        name: &str,
        (x, cell, party): (f64, &CellDocument, &PartyDocument),
    ) {
        let Some(spread) = field.spread(cell, party) else { return };
        self.add_point(name.to_owned(), false, x, spread);
        for (curve, value) in references::curves(scenario, cell, &party.name, &field.key) {
            self.add_point(format!("{name}, {curve}"), true, x, Spread::of([value]));
        }
    }

    fn add_point(&mut self, name: String, is_reference: bool, x: f64, y: Spread) {
        match self.0.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push((x, y)),
            None => self.0.push(Series { name, is_reference, points: vec![(x, y)] }),
        }
    }
}

/// Lines over the number in which cells differ; a line for each party.
fn by_cells(scenario: &str, family: &Family<'_>, field: &PlotField) -> Option<Plot> {
    if family.cells.len() < 2 {
        return None;
    }
    let mut lines = Lines::default();
    for (x, cell) in &family.cells {
        for party in &cell.parties {
            lines.add((scenario, field), &party.name, (*x, cell, party));
        }
    }
    let x = family.template.axis(family.position);
    let title = family.template.title(family.position);
    let (series, y) = (lines.0, field.head.clone());
    (!series.is_empty()).then_some(Plot { title, x, y, series, kind: Kind::Lines })
}

/// The parties of a cell whose names differ in one number, three at least, with their template.
fn numbered_parties(cell: &CellDocument) -> Option<(Template, Vec<(f64, &PartyDocument)>)> {
    let mut groups: BTreeMap<String, Vec<(Template, &PartyDocument)>> = BTreeMap::new();
    for party in &cell.parties {
        let template = Template::of(&party.name);
        if template.numbers.len() == 1 {
            groups.entry(template.kind.clone()).or_default().push((template, party));
        }
    }
    let group = groups.into_values().find(|group| group.len() >= 3)?;
    let many = group.iter().find(|(template, _)| template.numbers[0] > 1.0);
    let template = many.or(group.first())?.0.clone();
    let mut parties: Vec<(f64, &PartyDocument)> =
        group.iter().map(|(t, p)| (t.numbers[0], *p)).collect();
    parties.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    Some((template, parties))
}

/// Lines over the number in which parties differ; a line for each cell of the family.
fn by_parties(scenario: &str, family: &Family<'_>, field: &PlotField) -> Option<Plot> {
    let (template, _) = numbered_parties(family.cells[0].1)?;
    let axis = family.template.axis(family.position);
    let is_single = family.cells.len() < 2;
    let mut lines = Lines::default();
    for (number, cell) in &family.cells {
        let Some((_, parties)) = numbered_parties(cell) else { continue };
        let name = if is_single { template.title(0) } else { format!("{number} {axis}") };
        for (x, party) in parties {
            lines.add((scenario, field), &name, (x, cell, party));
        }
    }
    let name = &family.cells[0].1.name;
    let title = if is_single { name.clone() } else { family.template.title(family.position) };
    let (x, y, series) = (template.axis(0), field.head.clone(), lines.0);
    (!series.is_empty()).then_some(Plot { title, x, y, series, kind: Kind::Lines })
}

/// A bar for each party.
fn bars(cell: &CellDocument, field: &PlotField) -> Option<Plot> {
    let bar = |party: &PartyDocument| {
        let points = vec![(0.0, party.spread(&field.key)?)];
        Some(Series { name: party.name.clone(), is_reference: false, points })
    };
    let series: Vec<Series> = cell.parties.iter().filter_map(bar).collect();
    let (title, y) = (cell.name.clone(), field.head.clone());
    (series.len() > 1).then_some(Plot { title, x: String::new(), y, series, kind: Kind::Bars })
}

/// How many of a party's requests took how long, of all rounds together.
fn histogram(cell: &CellDocument) -> Option<Plot> {
    let line = |party: &PartyDocument| {
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        let of_all = party.samples.iter().filter_map(|sample| sample.get("latency_us")?.as_array());
        for bucket in of_all.flatten() {
            let (us, count) = (bucket.get(0)?.as_f64()?, bucket.get(1)?.as_f64()?);
            match buckets.iter_mut().find(|(other, _)| (*other - us).abs() < us * 1e-6) {
                Some((_, counts)) => *counts += count,
                None => buckets.push((us, count)),
            }
        }
        buckets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let all: f64 = buckets.iter().map(|(_, count)| count).sum();
        let share = |(us, count): (f64, f64)| (us, Spread::of([count / all * 100.0]));
        let points: Vec<(f64, Spread)> = buckets.into_iter().map(share).collect();
        (points.len() > 1).then(|| Series { name: party.name.clone(), is_reference: false, points })
    };
    let series: Vec<Series> = cell.parties.iter().filter_map(line).collect();
    (!series.is_empty()).then(|| Plot {
        title: cell.name.clone(),
        x: "microseconds".into(),
        y: "% of requests".into(),
        series,
        kind: Kind::Histogram,
    })
}

#[cfg(test)]
mod tests;
