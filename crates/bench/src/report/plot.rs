//! The plots of a page: lines, bars and histograms as SVG, drawn by plotters.

use super::Spread;
use super::compare::number;
use plotters::coord::Shift;
use plotters::prelude::{
    ChartBuilder, Circle, Color, DashedLineSeries, DrawingArea, FontStyle, IntoDrawingArea,
    IntoFont, IntoLogRange, LineSeries, PathElement, RGBColor, Rectangle, SVGBackend, Text,
    TextStyle, WHITE,
};

/// Pixels of a plot.
const SIZE: (u32, u32) = (520, 280);
/// Colours that people tell apart who see fewer of them.
pub(crate) const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(70, 70, 70),
];
const GRID: RGBColor = RGBColor(225, 225, 225);
const INK: RGBColor = RGBColor(60, 60, 60);

/// One line of a plot, or one bar if it has one point.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Figures of a reference: dashed, in the colour of the line before it that is none.
    pub(crate) is_reference: bool,
    /// A number on the axis below, and what was measured there.
    pub(crate) points: Vec<(f64, Spread)>,
}

/// A plot: its labels, its data, and how it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// The label of the horizontal axis.
    pub(crate) x: String,
    /// The label of the vertical axis.
    pub(crate) y: String,
    pub(crate) series: Vec<Series>,
    pub(crate) kind: Kind,
}

/// How a plot is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Lines over a few counts, at equal distances.
    Lines,
    /// A bar for each series, in their order.
    Bars,
    /// Lines over times that grow by factors.
    Histogram,
}

impl Plot {
    /// The colour of a series: that of a reference is the colour of ours.
    pub(crate) fn colour(&self, index: usize) -> RGBColor {
        let ours = self.series.iter().take(index + 1).filter(|series| !series.is_reference);
        COLOURS[ours.count().saturating_sub(1) % COLOURS.len()]
    }

    /// The plot as SVG; a sentence instead if the library cannot draw it.
    pub(crate) fn svg(&self) -> String {
        let mut svg = String::new();
        let drawn = {
            let area = SVGBackend::with_string(&mut svg, self.size()).into_drawing_area();
            let drawn = area.fill(&WHITE).map_err(|error| error.to_string());
            drawn.and_then(|()| match self.kind {
                Kind::Lines => self.lines(&area),
                Kind::Bars => self.bars(&area),
                Kind::Histogram => self.histogram(&area),
            })
        };
        match drawn {
            Ok(()) => svg,
            Err(problem) => format!("<p>no plot: {problem}</p>"),
        }
    }

    fn size(&self) -> (u32, u32) {
        let bars = u32::try_from(self.series.len()).unwrap_or(u32::MAX).min(50);
        if self.kind == Kind::Bars { (SIZE.0, 60 + bars * 34) } else { SIZE }
    }

    fn top(&self) -> f64 {
        let points = self.series.iter().flat_map(|series| &series.points);
        let top = points.map(|(_, spread)| spread.max).fold(0.0, f64::max);
        if top > 0.0 { top * 1.08 } else { 1.0 }
    }

    fn lines(&self, area: &Area<'_>) -> Result<(), String> {
        let stops = self.stops();
        let right = count(stops.len().max(1)) - 0.7;
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(16)
            .x_label_area_size(38)
            .y_label_area_size(66)
            .build_cartesian_2d(-0.3..right, 0.0..self.top())
            .map_err(failed)?;
        let place = |at: &f64| -> String {
            let index = (0..stops.len()).find(|index| (count(*index) - at).abs() < 1e-6);
            index.map_or(String::new(), |index| number_of_axis(stops[index]))
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(GRID)
            .light_line_style(WHITE)
            .axis_style(INK)
            .label_style(letters(13))
            .axis_desc_style(letters(13))
            .x_labels(stops.len().max(2))
            .y_labels(6)
            .x_label_formatter(&place)
            .y_label_formatter(&|value| number_of_axis(*value))
            .x_desc(&self.x)
            .y_desc(&self.y)
            .draw()
            .map_err(failed)?;
        for (index, series) in self.series.iter().enumerate() {
            let colour = self.colour(index);
            let at = |x: f64| stops.iter().position(|stop| (*stop - x).abs() < 1e-9);
            let points: Vec<(f64, Spread)> =
                series.points.iter().map(|(x, y)| (count(at(*x).unwrap_or(0)), *y)).collect();
            let line = points.iter().map(|(x, spread)| (*x, spread.median));
            if series.is_reference {
                let style = colour.mix(0.6).stroke_width(1);
                chart.draw_series(DashedLineSeries::new(line, 6, 4, style)).map_err(failed)?;
                continue;
            }
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2))).map_err(failed)?;
            let whisker = |(x, s): &(f64, Spread)| {
                PathElement::new(vec![(*x, s.min), (*x, s.max)], colour.mix(0.45).stroke_width(4))
            };
            chart.draw_series(points.iter().map(whisker)).map_err(failed)?;
            let dot = |(x, s): &(f64, Spread)| Circle::new((*x, s.median), 3, colour.filled());
            chart.draw_series(points.iter().map(dot)).map_err(failed)?;
        }
        area.present().map_err(failed)
    }

    /// The numbers below, each once, in order.
    fn stops(&self) -> Vec<f64> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let mut stops: Vec<f64> = points.map(|(x, _)| *x).collect();
        stops.sort_by(f64::total_cmp);
        stops.dedup();
        stops
    }

    fn bars(&self, area: &Area<'_>) -> Result<(), String> {
        let bars = self.series.len();
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(200)
            .build_cartesian_2d(0.0..self.top() * 1.15, -0.5..count(bars) - 0.5)
            .map_err(failed)?;
        let name = |at: &f64| -> String {
            let index = (0..bars).find(|index| (count(*index) - at).abs() < 1e-6);
            index.map_or(String::new(), |index| self.series[bars - 1 - index].name.clone())
        };
        chart
            .configure_mesh()
            .disable_y_mesh()
            .bold_line_style(GRID)
            .light_line_style(WHITE)
            .axis_style(INK)
            .label_style(letters(13))
            .axis_desc_style(letters(13))
            .x_labels(5)
            .y_labels(bars + 1)
            .x_label_formatter(&|value| number_of_axis(*value))
            .y_label_formatter(&name)
            .x_desc(&self.y)
            .draw()
            .map_err(failed)?;
        for (index, series) in self.series.iter().enumerate() {
            let Some((_, spread)) = series.points.first() else { continue };
            let (y, colour) = (count(bars - 1 - index), self.colour(index));
            let bar = Rectangle::new([(0.0, y - 0.3), (spread.median, y + 0.3)], colour.filled());
            chart.draw_series([bar]).map_err(failed)?;
            let whisker = vec![(spread.min, y), (spread.max, y)];
            chart
                .draw_series([PathElement::new(whisker, INK.mix(0.7).stroke_width(2))])
                .map_err(failed)?;
            let at = (spread.max + self.top() * 0.01, y + 0.17);
            let label = Text::new(number(spread.median), at, letters(13));
            chart.draw_series([label]).map_err(failed)?;
        }
        area.present().map_err(failed)
    }

    fn histogram(&self, area: &Area<'_>) -> Result<(), String> {
        let stops = self.stops();
        let first = stops.first().copied().unwrap_or(1.0).max(1e-3);
        let last = stops.last().copied().unwrap_or(10.0).max(first * 2.0);
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(16)
            .x_label_area_size(38)
            .y_label_area_size(66)
            .build_cartesian_2d((first..last).log_scale(), 0.0..self.top())
            .map_err(failed)?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(WHITE)
            .axis_style(INK)
            .label_style(letters(13))
            .axis_desc_style(letters(13))
            .x_labels(8)
            .y_labels(6)
            .x_label_formatter(&|value| number_of_axis(*value))
            .y_label_formatter(&|value| number_of_axis(*value))
            .x_desc(&self.x)
            .y_desc(&self.y)
            .draw()
            .map_err(failed)?;
        for (index, series) in self.series.iter().enumerate() {
            let line = series.points.iter().map(|(x, spread)| (*x, spread.median));
            let style = self.colour(index).stroke_width(2);
            chart.draw_series(LineSeries::new(line, style)).map_err(failed)?;
        }
        area.present().map_err(failed)
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn failed(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn letters(size: u32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size, FontStyle::Normal).into_font()).color(&INK)
}

#[allow(clippy::cast_precision_loss, reason = "a handful of places on an axis")]
fn count(places: usize) -> f64 {
    places as f64
}

/// A number as short as an axis needs it: `1.5M`, `250k`, `0.2`.
fn number_of_axis(value: f64) -> String {
    let short = |value: f64, unit: &str| {
        let digits = if value.abs() < 10.0 && value.fract().abs() > 0.04 { 1 } else { 0 };
        format!("{value:.digits$}{unit}")
    };
    match value.abs() {
        large if large >= 1e6 => short(value / 1e6, "M"),
        large if large >= 1e4 => short(value / 1e3, "k"),
        small if small > 0.0 && small < 1.0 => format!("{value:.2}"),
        _ => short(value, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(kind: Kind) -> Plot {
        let point = |x: f64| (x, Spread { median: x * 2.0, min: x, max: x * 3.0 });
        let series = |name| Series {
            name: String::from(name),
            is_reference: name == "reference",
            points: [1.0, 2.0, 4.0, 8.0].map(point).to_vec(),
        };
        Plot {
            title: "t".into(),
            x: "queue pairs".into(),
            y: "Mbit/s".into(),
            series: ["ours", "reference", "<theirs>"].map(series).into(),
            kind,
        }
    }

    #[test]
    fn every_kind_of_plot_is_svg_with_its_axes_named() {
        for kind in [Kind::Lines, Kind::Bars, Kind::Histogram] {
            let svg = plot(kind).svg();
            assert!(svg.starts_with("<svg") && svg.contains("</svg>"), "{kind:?}: {svg}");
            assert!(svg.contains("Mbit/s"), "{kind:?}");
            assert_eq!(svg.contains("queue pairs"), kind != Kind::Bars);
            assert!(!svg.contains("<theirs>"), "a name is text, not an element");
        }
        let lines = plot(Kind::Lines);
        assert_eq!(lines.svg().matches("<circle").count(), 8, "a reference has no rounds");
        let colours = [0, 1, 2].map(|index| lines.colour(index));
        assert_eq!(colours, [COLOURS[0], COLOURS[0], COLOURS[1]]);
    }

    #[test]
    fn a_plot_of_nothing_is_drawn_all_the_same() {
        for kind in [Kind::Lines, Kind::Bars, Kind::Histogram] {
            let empty = Plot { series: Vec::new(), ..plot(kind) };
            assert!(empty.svg().contains("svg"), "{kind:?}");
        }
    }

    #[test]
    fn numbers_of_an_axis_are_short() {
        let short = [0.0, 0.25, 7.0, 7.5, 5000.0, 25_000.0, 1_500_000.0].map(number_of_axis);
        assert_eq!(short, ["0", "0.25", "7", "7.5", "5000", "25k", "1.5M"]);
    }
}
