//! Charts of measurements, as SVG or PNG.

#[cfg(feature = "cuda")]
pub mod crossover;
#[cfg(feature = "cuda")]
pub mod ladder;
pub mod latency;
mod lettered;
pub mod paths;
pub mod rows;
mod timeline;

use crate::common::images::CommandFiles;
use lettered::LetteredBitmap;
use nvme_course::pipeline::trace::PipelineTrace;
use nvme_host::{Error, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::Path;
use timeline::TimelinePlot;

/// Pixels of a chart, and of one of several.
const SIZE: (u32, u32) = (960, 540);
const PANEL: (u32, u32) = (640, 400);
/// Charts side by side.
const COLUMNS: usize = 3;

/// Refuses a file name that no chart can be written to, before anything is measured.
pub fn check(path: &Path) -> Result<()> {
    if !matches!(extension(path).as_str(), "svg" | "png") {
        return Err(Error::usage(
            format!("'{}' is neither .svg nor .png", path.display()),
            "name the plot FILE.svg or FILE.png",
        ));
    }
    match path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        Some(folder) if !folder.is_dir() => {
            Err(Error::file("create", path)(io::ErrorKind::NotFound.into()))
        }
        _ => Ok(()),
    }
}

fn extension(path: &Path) -> String {
    path.extension()
        .map(|extension| extension.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default()
}

/// Path of a chart, and the files of the command, which it must not replace.
pub type PlotFile<'p> = (&'p Path, &'p CommandFiles);

/// Draws `chart` into `file`.
pub fn draw(file: PlotFile<'_>, chart: &LineChart) -> Result<()> {
    draw_all(file, std::slice::from_ref(chart))
}

/// Draws `charts` into `file`, in rows.
pub fn draw_all(file: PlotFile<'_>, charts: &[LineChart]) -> Result<()> {
    let columns = charts.len().clamp(1, COLUMNS);
    let rows = charts.len().div_ceil(columns).max(1);
    let panel = if charts.len() > 1 { PANEL } else { SIZE };
    let size = (panel.0 * columns as u32, panel.1 * rows as u32);
    write(file, size, &PlotSubject::Charts(charts, (rows, columns)))
}

/// Draws `trace` into `file`.
pub fn draw_timeline(file: PlotFile<'_>, title: &str, trace: &PipelineTrace) -> Result<()> {
    write(
        file,
        SIZE,
        &PlotSubject::Timeline(TimelinePlot { title, trace }),
    )
}

/// Subject of a picture.
enum PlotSubject<'p> {
    /// Charts, in a grid of (rows, columns).
    Charts(&'p [LineChart], (usize, usize)),
    Timeline(TimelinePlot<'p>),
}

fn write((path, files): PlotFile<'_>, size: (u32, u32), picture: &PlotSubject<'_>) -> Result<()> {
    let bytes = if extension(path) == "svg" {
        let mut text = String::new();
        let backend = SVGBackend::with_string(&mut text, size);
        draw_on(backend, picture).map_err(failed)?;
        text.into_bytes()
    } else {
        let mut pixels = vec![0; (size.0 * size.1 * 3) as usize];
        let bitmap = LetteredBitmap(BitMapBackend::with_buffer(&mut pixels, size));
        draw_on(bitmap, picture).map_err(failed)?;
        encode(&pixels, size).map_err(|error| Error::device(format!("PNG: {error}"), "try .svg"))?
    };
    let mut out = crate::common::file::OutputFile::create(Some(path), files)?;
    out.write(&bytes)?;
    out.commit()
}

fn failed(cause: String) -> Error {
    Error::device(
        format!("the plot could not be drawn: {cause}"),
        "leave --plot out",
    )
}

fn encode(pixels: &[u8], size: (u32, u32)) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

/// Lines over a linear x axis and a logarithmic y axis.
pub struct LineChart {
    title: String,
    x_name: &'static str,
    y_name: &'static str,
    x: Range<f64>,
    x_label: fn(f64) -> String,
    lines: Vec<ChartLine>,
}

/// A named line.
struct ChartLine {
    name: Cow<'static, str>,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

fn draw_on<B: DrawingBackend>(
    backend: B,
    picture: &PlotSubject<'_>,
) -> std::result::Result<(), String> {
    let root = backend.into_drawing_area();
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    match picture {
        PlotSubject::Timeline(timeline) => timeline.draw(&root)?,
        PlotSubject::Charts(charts, grid) => {
            let panels = root.split_evenly(*grid);
            let mut pairs = panels.iter().zip(*charts);
            pairs.try_for_each(|(panel, chart)| draw_in(panel, chart))?;
        }
    }
    root.present().map_err(|error| error.to_string())
}

fn draw_in<B: DrawingBackend>(
    panel: &DrawingArea<B, Shift>,
    picture: &LineChart,
) -> std::result::Result<(), String> {
    let mut chart = ChartBuilder::on(panel)
        .caption(&picture.title, ("sans-serif", 22))
        .margin(16)
        .margin_right(48)
        .x_label_area_size(48)
        .y_label_area_size(88)
        .build_cartesian_2d(picture.x.clone(), y_range(&picture.lines).log_scale())
        .map_err(|error| error.to_string())?;
    chart
        .configure_mesh()
        .x_desc(picture.x_name)
        .y_desc(picture.y_name)
        .x_labels(6)
        .x_label_formatter(&|x| (picture.x_label)(*x))
        .y_label_formatter(&|y| {
            if *y < 10.0 {
                format!("{y:.1}")
            } else {
                format!("{y:.0}")
            }
        })
        .label_style(("sans-serif", 14))
        .draw()
        .map_err(|error| error.to_string())?;
    for line in &picture.lines {
        let color = line.color;
        // Few points are drawn as dots, too, because a line of one point is invisible.
        let dots = line.points.iter().filter(|_| line.points.len() < 20);
        chart
            .draw_series(dots.map(|point| Circle::new(*point, 3, color.filled())))
            .map_err(|error| error.to_string())?;
        chart
            .draw_series(LineSeries::new(
                line.points.iter().copied(),
                ShapeStyle::from(color).stroke_width(2),
            ))
            .map_err(|error| error.to_string())?
            .label(line.name.clone())
            .legend(move |(x, y)| {
                PathElement::new(
                    [(x, y), (x + 18, y)],
                    ShapeStyle::from(color).stroke_width(2),
                )
            });
    }
    chart
        .configure_series_labels()
        .border_style(BLACK)
        .background_style(WHITE)
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(|error| error.to_string())
}

/// Returns the range of the y axis: it contains all points and some room around them.
fn y_range(lines: &[ChartLine]) -> Range<f64> {
    let heights = || {
        let points = lines.iter().flat_map(|line| line.points.iter());
        points.map(|point| point.1)
    };
    let low = heights().fold(f64::MAX, f64::min).max(0.001) / 1.5;
    low..heights().fold(low * 2.0, f64::max) * 1.5
}
