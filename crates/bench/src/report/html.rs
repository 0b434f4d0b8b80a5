//! The words of a page: text is escaped where it enters, so that no name can be an element.

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
    body: String,
}

impl Table {
    pub(crate) fn new(heads: Vec<Td>) -> Self {
        Self { heads, body: String::new() }
    }

    /// A line across the table: what the rows below are of, and the command behind them.
    pub(crate) fn group(&mut self, title: &str, command: &str) {
        let (span, title) = (self.heads.len(), escaped(title));
        let _ = write!(self.body, "<tr class=\"group\"><th colspan=\"{span}\">{title}");
        if !command.is_empty() {
            let _ = write!(self.body, "<code>{}</code>", escaped(command));
        }
        self.body.push_str("</th></tr>\n");
    }

    /// A line across the table, in words.
    pub(crate) fn note(&mut self, text: &str, class: &str) {
        let (span, text) = (self.heads.len(), escaped(text));
        let _ = writeln!(
            self.body,
            "<tr class=\"note {class}\"><td colspan=\"{span}\">{text}</td></tr>"
        );
    }

    /// A row, as wide as the heads: what is missing is empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Td>) {
        self.body.push_str("<tr>");
        let empty = std::iter::repeat_with(|| Td::word(""));
        for cell in cells.into_iter().chain(empty).take(self.heads.len()) {
            cell.write(&mut self.body, "td");
        }
        self.body.push_str("</tr>\n");
    }

    /// All of it.
    pub(crate) fn html(&self) -> String {
        let mut html = String::from("<div class=\"wide\"><table>\n<thead><tr>");
        self.heads.iter().for_each(|head| head.write(&mut html, "th"));
        let _ = write!(html, "</tr></thead>\n<tbody>\n{}</tbody></table></div>\n", self.body);
        html
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
    }

    #[test]
    fn a_page_asks_for_nothing_from_elsewhere_and_runs_nothing() {
        let page = page("t", "");
        for foreign in ["http", "<script", "@import", "url("] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }
}
