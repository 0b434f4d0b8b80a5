//! The page of a run: one file that a person can read without another one. And the page of two runs
//! that are compared.

use super::Spread;
use super::columns::{self, KNOWN};
use super::compare::{CellPair, Comparison, Row, Verdict, number};
use super::document::{RunDocument, ScenarioDocument};
use super::html::{Table, Td, escaped, page};
use super::plot::{Kind, Plot};
use super::rows::{self, Judged};
use super::{plots, references, tables};
use crate::plan;
use std::fmt::Write as _;

/// The page of a run.
pub(crate) fn of_run(document: &RunDocument) -> String {
    let mut body = head(document);
    body.push_str(&verdict(document));
    body.push_str(&all_plots(document));
    body.push_str(&how_to_read());
    for scenario in &document.scenarios {
        body.push_str(&section(scenario));
    }
    body.push_str(&calibration(document));
    page("Manyring: what it is worth on this machine", &body)
}

fn head(document: &RunDocument) -> String {
    let RunDocument { command, began, machine, scenarios, left_out, .. } = document;
    let mut text = format!("<p class=\"quiet\">{}", escaped(&machine.name));
    if machine.memory_mib > 0 {
        let _ = write!(text, ", {} MiB of memory", machine.memory_mib);
    }
    let governor = machine.governor.as_deref().unwrap_or("none is visible");
    let _ = write!(text, "; frequency governor: {}.<br>", escaped(governor));
    let took = plan::about(scenarios.iter().map(|scenario| scenario.took_seconds).sum());
    let _ = write!(
        text,
        "Began {}, took {took}: <code>{}</code></p>\n<nav>",
        escaped(began),
        escaped(command)
    );
    for scenario in scenarios {
        let name = escaped(&scenario.name);
        let _ = write!(text, "<a href=\"#{name}\">{name}</a> ");
    }
    text.push_str(
        "<a href=\"#plots\">plots</a> <a href=\"#machine\">the machine itself</a></nav>\n",
    );
    for sentence in left_out {
        let _ = writeln!(text, "<p class=\"bad\">Left out: {}</p>", escaped(sentence));
    }
    text
}

fn how_to_read() -> String {
    "<p>Each group of rows is one load, given to every party in turn, round by round. A number is \
     the median of the rounds; rest the pointer on it for the smallest and the largest. Below the \
     rows stand ratios: the median of the ratios of each round, with the smallest and the largest. \
     <b>Only such ratios travel to other machines.</b> The command of a group repeats it alone. \
     Grey columns are of the reference systems, on their machines of 2010 to 2015: what compares \
     is how figures change along sessions and queues, not their size.</p>\n"
        .to_owned()
}

/// What was promised, and whether it was kept: by scenario, and by rows of README.
fn verdict(document: &RunDocument) -> String {
    let mut text = String::from("<h2 id=\"verdict\">Verdict</h2>\n");
    let mut table = Table::new(["promise", "verdict", "figures"].map(Td::word).into());
    for scenario in &document.scenarios {
        let broken = scenario.broken.iter().map(|broken| ("A promise is broken", "worse", broken));
        let kept = scenario.kept.iter().map(|kept| ("kept", "better", kept));
        for (word, class, figures) in broken.chain(kept) {
            table.row([Td::word(&scenario.name), Td::word(word).class(class), Td::word(figures)]);
        }
    }
    for Judged { row, holds, words } in rows::judge(document) {
        let (word, class) = match holds {
            Some(true) => ("holds", "better"),
            Some(false) => ("does not hold", "worse"),
            None => continue,
        };
        table.row([Td::word(row), Td::word(word).class(class), Td::word(words)]);
    }
    if table.is_empty() {
        text.push_str("<p>No scenario of this run promises anything.</p>\n");
        return text;
    }
    text + &table.html()
}

/// The plots of all scenarios.
fn all_plots(document: &RunDocument) -> String {
    let mut text = String::from("<h2 id=\"plots\">The plots</h2>\n");
    for scenario in &document.scenarios {
        let (name, plots) = (escaped(&scenario.name), plots::of(scenario));
        if !plots.is_empty() {
            let _ = writeln!(text, "<h3><a href=\"#{name}\">{name}</a></h3>");
            text.push_str(&figures(&plots));
        }
    }
    text
}

/// A scenario: its sentence, its table, what stands beside it, and its histograms.
fn section(scenario: &ScenarioDocument) -> String {
    let name = escaped(&scenario.name);
    let mut text = format!("<h2 id=\"{name}\">{name}</h2>\n<p>{}.</p>\n", escaped(&scenario.about));
    let report = &scenario.report;
    let _ = writeln!(
        text,
        "<p class=\"quiet\">{} rounds of {} s; took {}. <code>{}</code></p>",
        report.rounds,
        report.seconds,
        plan::about(scenario.took_seconds),
        escaped(&scenario.command)
    );
    text.push_str(&tables::of(scenario).html());
    text.push_str(&tables::geomeans(scenario));
    for beside in references::beside(&scenario.name) {
        let _ =
            write!(text, "<h3>{}</h3>\n<p>{}</p>\n", escaped(beside.title), escaped(beside.about));
        text.push_str(&tables::of_reference(beside).html());
    }
    let latencies = plots::latencies(scenario);
    if !latencies.is_empty() {
        let _ = write!(
            text,
            "<details open><summary>How long requests took: {} histograms</summary>\n{}\
             </details>\n",
            latencies.len(),
            figures(&latencies)
        );
    }
    text
}

/// Plots side by side, each with its title and its colours.
fn figures(plots: &[Plot]) -> String {
    let mut text = String::from("<div class=\"plots\">\n");
    for plot in plots {
        let _ = write!(text, "<figure><figcaption>{}<br>", escaped(&plot.title));
        if plot.kind != Kind::Bars && plot.series.len() > 1 {
            let ours = plot.series.iter().enumerate().filter(|(_, series)| !series.is_reference);
            for (index, series) in ours {
                let colour = plot.colour(index);
                let (r, g, b) = (colour.0, colour.1, colour.2);
                let name = escaped(&series.name);
                let _ = write!(
                    text,
                    "<span><i style=\"background:rgb({r},{g},{b})\"></i>{name}</span>"
                );
            }
        }
        if plot.series.iter().any(|series| series.is_reference) {
            text.push_str("<span>dashed: the reference</span>");
        }
        let _ = writeln!(text, "</figcaption>{}</figure>", plot.svg());
    }
    text.push_str("</div>\n");
    text
}

/// The tables of the machine's basic costs, and of the columns' meanings.
fn calibration(document: &RunDocument) -> String {
    let mut text = String::from(
        "<h2 id=\"machine\">The machine itself</h2>\n<p>What single steps cost here, at the start \
         of the run. A sleeping client with one request in flight measures mostly the wake.</p>\n",
    );
    let mut table = Table::new(vec![Td::word("step"), Td::number("nanoseconds")]);
    for (step, cost) in document.costs.rows() {
        let cost = cost.map_or("not measured here".to_owned(), |ns| ns.to_string());
        table.row([Td::word(step), Td::number(cost)]);
    }
    text.push_str(&table.html());
    text.push_str("<h3>The columns</h3>\n");
    let mut table = Table::new(vec![Td::word("column"), Td::word("what it is")]);
    let all = document.scenarios.iter().flat_map(|scenario| &scenario.report.cells);
    let heads = columns::of_cells(all);
    for column in KNOWN.iter().filter(|known| heads.iter().any(|head| head.key() == known.key)) {
        table.row([Td::word(column.head), Td::word(column.about)]);
    }
    text + &table.html()
}

/// The page of two runs.
pub(crate) fn of_comparison(before: &RunDocument, after: &RunDocument, all: &Comparison) -> String {
    let mut body = format!(
        "<p><b>{}</b>. A number counts as better or worse only if no round of one run lies among \
         those of the other, and if the medians are further apart than the rounds of either run; \
         everything else is within noise. The two runs did not take turns: what changed the \
         machine in between changed all parties.</p>\n",
        escaped(&all.summary())
    );
    for (which, document) in [("Before", before), ("After", after)] {
        let RunDocument { machine, began, command, .. } = document;
        let _ = writeln!(
            body,
            "<p class=\"quiet\">{which}: {} on {}: <code>{}</code></p>",
            escaped(began),
            escaped(&machine.name),
            escaped(command)
        );
    }
    let heads = ["party", "number"].map(Td::word).into_iter();
    let heads = heads.chain(["before", "after", "after / before", "verdict"].map(Td::number));
    let mut table = Table::new(heads.collect());
    for CellPair { scenario, cell, unit, rows } in &all.pairs {
        let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
        table.group(&format!("{scenario}: {cell}{unit}"), "");
        let judged = rows.iter().filter(|row| row.head.better() != columns::Better::Neither);
        judged.for_each(|row| table.row(compared(row)));
    }
    body.push_str(&table.html());
    for sentence in &all.alone {
        let _ = writeln!(body, "<p class=\"quiet\">{}</p>", escaped(sentence));
    }
    page("Manyring: two runs compared", &body)
}

fn compared(row: &Row) -> [Td; 6] {
    let rounds = |s: &Spread| format!("{} to {}", number(s.min), number(s.max));
    let class = match row.verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::Noise | Verdict::Differs => "same",
    };
    [
        Td::word(&row.party),
        Td::word(row.head.text()),
        Td::number(number(row.before.median)).titled(rounds(&row.before)),
        Td::number(number(row.after.median)).titled(rounds(&row.after)),
        Td::number(format!("{:.2}x", row.ratio())),
        Td::word(row.verdict.word()).class(class),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::tests::scenario;

    fn document(scenarios: Vec<ScenarioDocument>) -> RunDocument {
        let left_out = vec!["fio is not installed: apt-get install fio".into()];
        RunDocument {
            command: "manyring-bench run <all>".into(),
            scenarios,
            left_out,
            ..RunDocument::default()
        }
    }

    #[test]
    fn a_page_has_every_table_row_command_and_plot() {
        let mut one = scenario(
            "tap-stream",
            "guest to host, 2 streams by queue pairs",
            &[
                ("manyring, 4 pairs", &[100.0, 200.0, 150.0]),
                ("manyring, 2 pairs", &[100.0]),
                ("manyring, 1 pairs", &[100.0]),
            ],
        );
        one.broken = vec!["<promise>".into()];
        let page = of_run(&document(vec![one]));
        for there in [
            "<h2 id=\"tap-stream\">",
            "<th class=\"n\">sessions</th><th class=\"n\" title=\"in the unit",
            ">throughput</th>",
            ">cpu %</th>",
            ">normalized</th>",
            "ref. Mbit/s",
            "title=\"100 to 200 in 3 rounds\">150<",
            "--only=&#39;guest to host, 2 streams by queue pairs&#39;",
            "broken</td><td>&lt;promise&gt;",
            "apt-get install fio",
            "not measured here",
            "<td class=\"ref\">1.05x</td>",
            ">1.22x</td><td class=\"n\">1.00x</td>",
            "run &lt;all&gt;",
        ] {
            assert!(page.contains(there), "{there} is not in {page}");
        }
        assert_eq!((page.matches("<figure>").count(), page.matches("<svg").count()), (4, 4));
        let at = |words: &str| page.find(words).unwrap();
        let order = ["&lt;promise&gt;", "<figure>", "<table>\n<thead><tr><th>party"].map(at);
        assert!(order.is_sorted(), "verdict, plots, tables: {order:?}");
        assert_eq!(page.matches("g2local_default, 4 queues").count(), 4);
        assert_eq!(page.matches("g2local_default, 1 queues, 4 virtual CPUs").count(), 4);
    }

    #[test]
    fn ratios_are_a_line_below_the_rows_and_disturbed_runs_are_said() {
        let mut one = scenario("null-blk", "c", &[("manyring", &[1.0, 2.0]), ("fio", &[1.0])]);
        let cell = &mut one.report.cells[0];
        let spread = serde_json::json!({"median": 2.0, "min": 1.5, "max": 2.5});
        let ratios = serde_json::json!({"peer": "fio", "cpu_per_unit": spread, "iops": spread});
        cell.against.push(ratios.as_object().unwrap().clone());
        cell.parties[0].samples[0].insert("disturbed".into(), true.into());
        let page = of_run(&document(vec![one]));
        let line = "manyring against fio: requests/s 2.00x (1.50 to 2.50), cpu per unit 2.00x";
        assert!(page.contains(line), "{page}");
        assert!(page.contains("disturbed 1 of 3 runs"));
    }

    #[test]
    fn the_page_of_two_runs_marks_what_is_noise() {
        let run = |rounds: &[f64]| document(vec![scenario("s", "c", &[("a", rounds)])]);
        let (before, after) = (run(&[100.0, 101.0]), run(&[300.0, 301.0]));
        let page = of_comparison(&before, &after, &Comparison::new(&before, &after));
        assert!(page.contains("<td class=\"better\">better</td>"), "{page}");
        let same = of_comparison(&before, &before, &Comparison::new(&before, &before));
        assert!(same.contains("0 better, 0 worse, 2 within noise"));
        assert!(same.contains("<td class=\"same\">within noise</td>"));
    }
}
