//! Compares whole screens with pictures in files: every line of text, and below it every stretch of
//! a line that is not plain. A change of what `manyring top` shows changes the files in `pictures`.

use super::tests::{disk, model, network, press, three, type_in};
use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::KeyCode;
use std::fmt::Write as _;
use std::path::Path;

/// Returns the text of a screen, and below it `line: first..last style` for each stretch that is
/// not plain.
fn picture(buffer: &Buffer) -> String {
    let (width, height) = (buffer.area.width, buffer.area.height);
    let (mut text, mut styles) = (String::new(), String::new());
    for y in 0..height {
        let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        let _ = writeln!(text, "{}", line.trim_end());
        let style = |x: u16| (buffer[(x, y)].fg, buffer[(x, y)].modifier);
        let mut first = 0;
        while first < width {
            let last = (first..width).take_while(|x| style(*x) == style(first)).last();
            let last = last.unwrap_or(first);
            let (color, more) = style(first);
            if (color, more) != (Color::Reset, Modifier::empty()) {
                let color = if color == Color::Reset { String::new() } else { format!(" {color}") };
                let _ = writeln!(styles, "{y}: {first}..{last}{color} {more:?}");
            }
            first = last + 1;
        }
    }
    format!("{text}{}\n{styles}", "=".repeat(usize::from(width)))
}

/// Draws a model on a screen of this size, and compares the screen with the picture `name`. With
/// `MANYRING_PICTURES=write` the screen first becomes the picture; then review the change of the
/// file.
fn shows(model: &mut Model, width: u16, height: u16, name: &str) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    let drawn = picture(terminal.backend().buffer());
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/top/draw/pictures");
    let path = pictures.join(format!("{name}-{width}x{height}.txt"));
    if std::env::var("MANYRING_PICTURES").is_ok_and(|what| what == "write") {
        std::fs::write(&path, &drawn).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(drawn == expected, "{}, but drawn was:\n{drawn}", path.display());
}

#[test]
fn devices_on_eighty_columns() {
    shows(&mut model(three(0), three(2)), 80, 24, "devices");
}

#[test]
fn wide_terminals_show_long_names_and_narrow_ones_fewer_columns() {
    let several = |done: u64| {
        let mut shown = three(done);
        shown.devices.push(disk("shop-database-primary.vda", 90_000 * done, 0));
        shown.devices.push(network("shop-database-primary.lan0", 5000 * done));
        shown
    };
    let mut wide = model(several(0), several(3));
    shows(&mut wide, 120, 30, "devices");
    shows(&mut wide, 60, 12, "devices");
}

#[test]
fn queues_that_are_filtered_sorted_and_paused() {
    let several = |done: u64| {
        let mut shown = three(done);
        shown.devices.extend((1..5).map(|n| disk(&format!("vm{n}"), done * n * 1000, 0)));
        shown
    };
    let mut model = model(several(0), several(2));
    type_in(&mut model, "2sss/vm");
    press(&mut model, &[KeyCode::Enter, KeyCode::Down]);
    type_in(&mut model, "p");
    shows(&mut model, 80, 24, "queues");
    type_in(&mut model, "r/3");
    shows(&mut model, 80, 24, "queues-filtered");
}

#[test]
fn workers_of_device_processes_and_a_device_that_a_device_process_serves() {
    let several = |done: u64| {
        let mut shown = three(done);
        shown.devices[0].process = Some("shop".to_owned());
        let mut worker = shown.workers[0].clone();
        worker.process = "shop".into();
        shown.workers.push(worker);
        shown
    };
    let mut model = model(several(0), several(2));
    press(&mut model, &[KeyCode::End]);
    shows(&mut model, 80, 24, "process");
    type_in(&mut model, "3");
    shows(&mut model, 80, 24, "workers");
}

#[test]
fn help_over_devices_and_a_daemon_that_has_gone() {
    let mut model = model(three(0), three(2));
    type_in(&mut model, "?");
    shows(&mut model, 80, 24, "help");
    type_in(&mut model, "?");
    let problem = "/run/manyring/control: no answer from the daemon within 5 s";
    model.take(Err(problem.to_owned()), tokio::time::Instant::now());
    shows(&mut model, 100, 24, "gone");
}
