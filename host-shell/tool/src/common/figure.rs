//! Pictures of terminals for the documents, as SVG. `UPDATE_FIGURES=1 cargo test -p nvme-gpu figure` writes them.

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::Modifier;
use std::fmt::Write;
use std::path::Path;

/// Pixels of a cell, and of the border.
const CELL: (usize, usize) = (8, 18);
const BORDER: usize = 12;
const BACKGROUND: &str = "#1c1f26";
const FOREGROUND: &str = "#d8dce4";

/// Fails unless the committed picture `name` is that of the cells.
pub fn check(name: &str, title: &str, cells: &Buffer) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures/screens");
    let (path, made) = (folder.join(format!("{name}.svg")), svg(title, cells));
    if std::env::var_os("UPDATE_FIGURES").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == made,
        "{} differs: UPDATE_FIGURES=1 cargo test -p nvme-gpu figure",
        path.display()
    );
}

fn svg(title: &str, cells: &Buffer) -> String {
    let area = cells.area;
    let (columns, lines) = (usize::from(area.width), usize::from(area.height));
    let (width, height) = (columns * CELL.0 + 2 * BORDER, lines * CELL.1 + 2 * BORDER);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" font-size=\"13\">\n\
         <title>{}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"{BACKGROUND}\"/>\n",
        escaped(title)
    );
    for (line, cells) in cells.content().chunks(columns).enumerate() {
        let mut column = 0;
        for run in cells.chunk_by(|a, b| look(a) == look(b)) {
            add_run(&mut text, (column, line), run);
            column += run.len();
        }
    }
    text += "</svg>\n";
    text
}

/// Returns whether a cell is bold, and whether its colours are exchanged.
fn look(cell: &Cell) -> (bool, bool) {
    (
        cell.modifier.contains(Modifier::BOLD),
        cell.modifier.contains(Modifier::REVERSED),
    )
}

fn add_run(text: &mut String, (column, line): (usize, usize), run: &[Cell]) {
    let (is_bold, is_reversed) = look(&run[0]);
    let (x, y) = (BORDER + column * CELL.0, BORDER + line * CELL.1);
    let width = run.len() * CELL.0;
    let mut colour = FOREGROUND;
    if is_reversed {
        let height = CELL.1;
        writeln!(
            text,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{FOREGROUND}\"/>"
        )
        .unwrap();
        colour = BACKGROUND;
    }
    let symbols: String = run.iter().map(Cell::symbol).collect();
    let shown = symbols.trim_end();
    let length = shown.chars().count() * CELL.0;
    if length > 0 {
        let weight = if is_bold { " font-weight=\"bold\"" } else { "" };
        let y = y + CELL.1 - 5;
        // Fonts differ in width: the length keeps the columns in their places.
        writeln!(
            text,
            "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\"{weight} textLength=\"{length}\" \
             xml:space=\"preserve\">{}</text>",
            escaped(shown)
        )
        .unwrap();
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    #[test]
    fn a_picture_has_each_run_of_one_look_in_its_place() {
        let mut cells = Buffer::empty(Rect::new(0, 0, 10, 2));
        cells.set_string(0, 0, "a<b", Style::new().add_modifier(Modifier::BOLD));
        cells.set_string(2, 1, "x y", Style::new().add_modifier(Modifier::REVERSED));
        let text = svg("t & u", &cells);
        assert!(text.contains("<title>t &amp; u</title>"));
        assert!(
            text.contains("font-weight=\"bold\" textLength=\"24\" xml:space=\"preserve\">a&lt;b<")
        );
        assert!(text.contains("<rect x=\"28\" y=\"30\" width=\"24\" height=\"18\""));
        assert!(text.contains("fill=\"#1c1f26\" textLength=\"24\" xml:space=\"preserve\">x y<"));
        assert_eq!(text.matches("<text").count(), 2);
    }
}
