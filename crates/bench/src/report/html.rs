//! A table for a page and for a terminal, and the page around it: text is escaped where it enters a
//! page, so that no name can be an element.

use std::fmt::Write as _;

/// Text as it stands in a page, also within an attribute.
pub(crate) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Td {
    text: String,
    title: String,
    class: &'static str,
}

impl Td {
    /// A word.
    pub(crate) fn word(text: impl Into<String>) -> Self {
        Self { text: text.into(), title: String::new(), class: "" }
    }

    /// A number.
    pub(crate) fn number(text: impl Into<String>) -> Self {
        Self { class: "n", ..Self::word(text) }
    }

    /// With what is shown where the pointer rests.
    pub(crate) fn titled(self, title: impl Into<String>) -> Self {
        Self { title: title.into(), ..self }
    }

    /// With a class of the page's style.
    pub(crate) fn class(self, class: &'static str) -> Self {
        Self { class, ..self }
    }

    fn write(&self, page: &mut String, element: &str) {
        let _ = write!(page, "<{element}");
        for (name, value) in [("class", self.class), ("title", &self.title)] {
            if !value.is_empty() {
                let _ = write!(page, " {name}=\"{}\"", escaped(value));
            }
        }
        let _ = write!(page, ">{}</{element}>", escaped(&self.text));
    }
}

/// A table whose rows lie in groups, each with a line above it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    heads: Vec<Td>,
    lines: Vec<TableLine>,
}

/// A line of a table.
#[derive(Clone, Debug)]
enum TableLine {
    /// What the rows below are of, and the command behind them.
    Group(String, String),
    /// As wide as the heads.
    Row(Vec<Td>),
    /// Words across the table, and their class.
    Note(String, &'static str),
}

impl Table {
    pub(crate) fn new(heads: Vec<Td>) -> Self {
        Self { heads, lines: Vec::new() }
    }

    /// A line across the table: what the rows below are of, and the command behind them.
    pub(crate) fn group(&mut self, title: &str, command: &str) {
        self.lines.push(TableLine::Group(title.to_owned(), command.to_owned()));
    }

    /// A line across the table, in words.
    pub(crate) fn note(&mut self, text: &str, class: &'static str) {
        self.lines.push(TableLine::Note(text.to_owned(), class));
    }

    /// A row, as wide as the heads: what is missing is empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Td>) {
        let empty = std::iter::repeat_with(|| Td::word(""));
        let cells = cells.into_iter().chain(empty).take(self.heads.len());
        self.lines.push(TableLine::Row(cells.collect()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The table as an element of a page.
    pub(crate) fn html(&self) -> String {
        let span = self.heads.len();
        let mut html = String::from("<div class=\"wide\"><table>\n<thead><tr>");
        self.heads.iter().for_each(|head| head.write(&mut html, "th"));
        html.push_str("</tr></thead>\n<tbody>\n");
        for line in &self.lines {
            match line {
                TableLine::Group(title, command) => {
                    let title = escaped(title);
                    let _ = write!(html, "<tr class=\"group\"><th colspan=\"{span}\">{title}");
                    if !command.is_empty() {
                        let _ = write!(html, "<code>{}</code>", escaped(command));
                    }
                    html.push_str("</th></tr>\n");
                }
                TableLine::Row(cells) => {
                    html.push_str("<tr>");
                    cells.iter().for_each(|cell| cell.write(&mut html, "td"));
                    html.push_str("</tr>\n");
                }
                TableLine::Note(text, class) => {
                    let _ = write!(html, "<tr class=\"note {class}\"><td colspan=\"{span}\">");
                    let _ = writeln!(html, "{}</td></tr>", escaped(text));
                }
            }
        }
        html + "</tbody></table></div>\n"
    }

    /// The table for a terminal: the heads above each group, or once.
    pub(crate) fn text(&self) -> String {
        let rows = self.lines.iter().filter_map(|line| match line {
            TableLine::Row(cells) => Some(cells),
            _ => None,
        });
        let mut widths = vec![0; self.heads.len()];
        for cells in rows.chain([&self.heads]) {
            let all = widths.iter_mut().zip(cells);
            all.for_each(|(width, cell)| *width = (*width).max(cell.text.chars().count()));
        }
        let line = |cells: &[Td]| -> String {
            let all = cells.iter().zip(&widths);
            let padded = all.map(|(Td { text, class, .. }, &width)| match class.is_empty() {
                true => format!("  {text:<width$}"),
                false => format!("  {text:>width$}"),
            });
            padded.collect::<String>().trim_end().to_owned() + "\n"
        };
        let mut text = String::new();
        if !matches!(self.lines.first(), Some(TableLine::Group(..))) {
            text.push_str(&line(&self.heads));
        }
        for one in &self.lines {
            match one {
                TableLine::Group(title, _) => text += &format!("{title}\n{}", line(&self.heads)),
                TableLine::Row(cells) => text += &line(cells),
                TableLine::Note(note, _) => text += &format!("    {note}\n"),
            }
        }
        text
    }
}

/// A page of its own: no script, and nothing from elsewhere.
pub(crate) fn page(title: &str, body: &str) -> String {
    let title = escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n\
         <style>{STYLE}</style></head>\n<body><main>\n<h1>{title}</h1>\n{body}\
         </main></body></html>\n"
    )
}

const STYLE: &str = include_str!("page.css");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_never_an_element_nor_the_end_of_an_attribute() {
        assert_eq!(escaped("<b a='1' c=\"2\">&"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;");
        let mut table = Table::new(vec![Td::word("<i>")]);
        table.group("<i>", "<i>");
        table.note("<i>", "");
        table.row([Td::word("<i>").titled("\"<i>")]);
        let page = page("<i>", &table.html());
        assert!(!page.contains("<i>"), "{page}");
        assert!(page.contains("title=\"&quot;&lt;i&gt;\""), "{page}");
    }

    #[test]
    fn a_row_is_as_wide_as_the_heads() {
        let mut table = Table::new(vec![Td::word("a"), Td::word("b")]);
        table.row([Td::number("1")]);
        table.row([Td::number("1"), Td::number("2"), Td::number("3")]);
        table.note("n", "bad");
        let html = table.html();
        assert_eq!(html.matches("<td").count(), 5, "{html}");
        assert!(html.contains("colspan=\"2\""));
        assert_eq!(table.text(), "  a  b\n  1\n  1  2\n    n\n");
    }

    #[test]
    fn a_page_asks_for_nothing_from_elsewhere_and_runs_nothing() {
        let page = page("t", "");
        for foreign in ["http", "<script", "@import", "url("] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }
}
