//! Draws a [`Model`] on a terminal of any size. On 80 columns or more, all columns are shown.

use super::columns::{Cell, Row, View};
use super::model::Model;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{self, Block, Clear, Paragraph, Table, TableState};

const DETAIL_LINES: u16 = 5;

const HELP: &str = "\
1 2 3, Tab    devices, queues, workers
Enter         the queues of a device
/ Esc         show names that hold a text; all
s S, > <      order by the next, the last column
r             the other way round
p, space      stand still, go on
up down, k j  choose a row (also PgUp PgDn Home End)
? h           this page
q, Ctrl-C     leave

IN is to the guest, OUT is from it. p99 is how long a
disk's requests take, and how long a network's packets
wait to be seen. LOST are a disk's errors and a
network's drops. HIT% is how often looking for work
before sleeping has found some, LOOK% the CPU for it.";

/// Draws the whole screen from the model.
pub(super) fn draw(frame: &mut Frame<'_>, model: &mut Model) {
    let alarm = model.alarm();
    let heights = [
        Constraint::Length(2),
        Constraint::Length(u16::from(alarm.is_some())),
        Constraint::Min(3),
        Constraint::Length(DETAIL_LINES),
        Constraint::Length(1),
    ];
    let [head, alarm_line, body, detail, foot] = Layout::vertical(heights).areas(frame.area());
    frame.render_widget(header(model), head);
    if let Some(alarm) = alarm {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        frame.render_widget(Paragraph::new(alarm).style(style), alarm_line);
    }
    let rows = model.rows();
    model.page = usize::from(body.height.saturating_sub(1)).max(1);
    table(frame, body, model, &rows);
    let lines: Vec<Line<'_>> = model.details(&rows).into_iter().map(Line::from).collect();
    frame.render_widget(Paragraph::new(Text::from(lines)).style(Style::new().dim()), detail);
    frame.render_widget(footer(model), foot);
    if model.is_help {
        help(frame);
    }
}

fn header(model: &Model) -> Paragraph<'static> {
    let mut tabs = format!("manyring top  {}  ", model.control);
    for (number, view) in View::ALL.into_iter().enumerate() {
        let name = view.name();
        let shown = if view == model.view { name.to_uppercase() } else { name.to_owned() };
        tabs += &format!(" {}:{shown}", number + 1);
    }
    if model.is_paused {
        tabs += "  PAUSED";
    }
    let lines = vec![
        Line::styled(tabs, Style::new().add_modifier(Modifier::BOLD)),
        Line::from(model.summary()),
    ];
    Paragraph::new(lines)
}

fn footer(model: &Model) -> Paragraph<'static> {
    let text = if model.is_typing {
        format!("names with: {}_   (Enter: done, Esc: all)", model.filter)
    } else {
        // The filter stands first, because a narrow terminal cuts the end of the line.
        let filter = match model.filter.as_str() {
            "" => String::new(),
            text => format!("only {text:?}, Esc all   "),
        };
        format!("{filter}q leave  ? help  / filter  s order  p pause  Tab view")
    };
    Paragraph::new(text).style(Style::new().add_modifier(Modifier::REVERSED))
}

fn table(frame: &mut Frame<'_>, area: Rect, model: &Model, rows: &[Row]) {
    let columns = whole(model.view.columns(), area.width);
    let is_text =
        |column: usize| rows.first().is_none_or(|row| matches!(row.cells[column], Cell::Text(_)));
    let aligned = |column: usize, text: &str| {
        let side = if is_text(column) { Alignment::Left } else { Alignment::Right };
        Text::from(text.to_owned()).alignment(side)
    };
    let names = columns.iter().enumerate().map(|(column, (name, _))| {
        let mut style = Style::new().add_modifier(Modifier::BOLD);
        if column == model.sorted_by() {
            style = style.add_modifier(Modifier::UNDERLINED);
            if model.is_reversed() {
                style = style.add_modifier(Modifier::ITALIC);
            }
        }
        aligned(column, name).style(style)
    });
    let lines = rows.iter().map(|row| {
        let cells = row.cells.iter().take(columns.len()).enumerate();
        let style = if row.is_bad { Style::new().fg(Color::Yellow) } else { Style::new() };
        widgets::Row::new(cells.map(|(column, cell)| aligned(column, cell.shown()))).style(style)
    });
    // Where there is room, the first column is as wide as the longest name.
    let fixed: u16 = columns[1..].iter().map(|(_, width)| width + 1).sum();
    let longest = rows.iter().map(|row| row.cells[0].shown().chars().count()).max();
    let longest = u16::try_from(longest.unwrap_or(0)).unwrap_or(u16::MAX);
    let first = longest.min(area.width.saturating_sub(fixed)).max(columns[0].1);
    let widths = columns
        .iter()
        .enumerate()
        .map(|(column, (_, width))| Constraint::Length(if column == 0 { first } else { *width }));
    let table = Table::new(lines, widths)
        .header(widgets::Row::new(names))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let chosen = (!rows.is_empty()).then(|| model.chosen(rows));
    let mut state = TableState::new().with_selected(chosen);
    frame.render_stateful_widget(table, area, &mut state);
}

/// Returns the columns that fit a terminal of this width as a whole: a number of which digits are
/// cut would be wrong.
fn whole(columns: &'static [(&'static str, u16)], width: u16) -> &'static [(&'static str, u16)] {
    let mut used = 0;
    let fits = columns.iter().take_while(|(_, width_of_column)| {
        used += width_of_column + 1;
        used <= width.saturating_add(1)
    });
    &columns[..fits.count().max(1)]
}

fn help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let (width, height) = (60.min(area.width), 18.min(area.height));
    let (x, y) = ((area.width - width) / 2, (area.height - height) / 2);
    let area = Rect { x, y, width, height };
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title("manyring top")), area);
}

#[cfg(test)]
mod pictures;
#[cfg(test)]
mod tests;
