//! The chart of a bench run, as SVG or PNG. Needs no font files: PNG text is drawn from an 8x8 bitmap font.

use font8x8::legacy::BASIC_LEGACY;
use nvme_host::bench::Report;
use nvme_host::{Error, Result, units};
use plotters::prelude::*;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendStyle, BackendTextStyle, DrawingErrorKind};
use std::io;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (960, 540);

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

/// Draws `report` into `path`.
pub fn draw(path: &Path, report: &Report) -> Result<()> {
    let bytes = if extension(path) == "svg" {
        let mut text = String::new();
        chart(SVGBackend::with_string(&mut text, SIZE), report).map_err(failed)?;
        text.into_bytes()
    } else {
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        chart(
            Lettered(BitMapBackend::with_buffer(&mut pixels, SIZE)),
            report,
        )
        .map_err(failed)?;
        encode(&pixels).map_err(|error| Error::device(format!("PNG: {error}"), "try .svg"))?
    };
    let mut out = crate::common::file::Output::create(Some(path))?;
    out.write(&bytes)?;
    out.commit()
}

fn failed(cause: String) -> Error {
    Error::device(
        format!("the plot could not be drawn: {cause}"),
        "leave --plot out",
    )
}

fn encode(pixels: &[u8]) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

/// A named line.
struct Line {
    name: &'static str,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

fn chart<B: DrawingBackend>(backend: B, report: &Report) -> std::result::Result<(), String> {
    let root = backend.into_drawing_area();
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    let is_ramp = report.steps.len() > 1;
    let (lines, x_name) = if is_ramp {
        (over_rate(report), "commands/s")
    } else {
        (percentiles(report), "percentile")
    };
    let (high_x, y_range) = ranges(&lines, is_ramp);
    let mut chart = ChartBuilder::on(&root)
        .caption(title(report), ("sans-serif", 22))
        .margin(16)
        .margin_right(48)
        .x_label_area_size(48)
        .y_label_area_size(88)
        .build_cartesian_2d(0.0..high_x, y_range.log_scale())
        .map_err(|error| error.to_string())?;
    let percent = |x: &f64| format!("{}", 100.0 - 100.0 / 10f64.powf(*x));
    let rate = |x: &f64| units::count(*x);
    let x_label: &dyn Fn(&f64) -> String = if is_ramp { &rate } else { &percent };
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc("latency, us")
        .x_labels(6)
        .x_label_formatter(x_label)
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
    for line in lines {
        let color = line.color;
        chart
            .draw_series(LineSeries::new(
                line.points,
                ShapeStyle::from(color).stroke_width(2),
            ))
            .map_err(|error| error.to_string())?
            .label(line.name)
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
        .map_err(|error| error.to_string())?;
    root.present().map_err(|error| error.to_string())
}

/// The end of the x axis, and the y axis: all points are inside, with room around them.
fn ranges(lines: &[Line], is_ramp: bool) -> (f64, Range<f64>) {
    let points = || lines.iter().flat_map(|line| line.points.iter());
    let lowest = points().map(|point| point.1).fold(f64::MAX, f64::min);
    let low_y = lowest.max(0.001) / 1.5;
    let high_y = points().map(|point| point.1).fold(low_y * 2.0, f64::max) * 1.5;
    let high_x = match is_ramp {
        true => points().map(|point| point.0).fold(1.0, f64::max) * 1.02,
        // Five nines.
        false => 5.0,
    };
    (high_x, low_y..high_y)
}

fn title(report: &Report) -> String {
    let (read, write) = report.total();
    format!(
        "{} {} x{} depth {}: {} IOPS",
        report.rw(),
        units::bytes(u64::from(report.job.bytes)),
        report.job.queues,
        report.job.depth,
        units::count(read.iops() + write.iops())
    )
}

/// Latency over percentile, the x axis counting nines: 90 % at 1, 99.99 % at 4.
fn percentiles(report: &Report) -> Vec<Line> {
    let (read, write) = report.total();
    let one = |direction: &nvme_host::bench::Direction| {
        let at = |step: u32| {
            let nines = f64::from(step) / 20.0;
            (
                nines,
                direction.percentile(100.0 - 100.0 / 10f64.powf(nines)) as f64 / 1e3,
            )
        };
        (0..=100).map(at).collect()
    };
    let all = [("read", BLUE, &read), ("write", RED, &write)];
    let used = all
        .into_iter()
        .filter(|(_, _, direction)| direction.commands > 0);
    used.map(|(name, color, direction)| Line {
        name,
        color,
        points: one(direction),
    })
    .collect()
}

fn over_rate(report: &Report) -> Vec<Line> {
    let one = |name, color, percent| {
        let point = |step: &nvme_host::bench::Step| {
            (
                step.iops(),
                step.latency().value_at_percentile(percent) as f64 / 1e3,
            )
        };
        Line {
            name,
            color,
            points: report.steps.iter().map(point).collect(),
        }
    };
    vec![
        one("p50", BLUE, 50.0),
        one("p99", GREEN, 99.0),
        one("p99.9", RED, 99.9),
    ]
}

/// A bitmap whose text comes from a built-in font.
struct Lettered<'a>(BitMapBackend<'a>);

/// Pixels of a letter, at twice the font's own size for titles.
fn scale(style: &impl BackendTextStyle) -> i32 {
    if style.size() >= 20.0 { 2 } else { 1 }
}

impl DrawingBackend for Lettered<'_> {
    type ErrorType = <BitMapBackend<'static> as DrawingBackend>::ErrorType;

    fn get_size(&self) -> (u32, u32) {
        self.0.get_size()
    }

    fn ensure_prepared(&mut self) -> std::result::Result<(), DrawingErrorKind<Self::ErrorType>> {
        self.0.ensure_prepared()
    }

    fn present(&mut self) -> std::result::Result<(), DrawingErrorKind<Self::ErrorType>> {
        self.0.present()
    }

    fn draw_pixel(
        &mut self,
        point: (i32, i32),
        color: BackendColor,
    ) -> std::result::Result<(), DrawingErrorKind<Self::ErrorType>> {
        self.0.draw_pixel(point, color)
    }

    fn draw_line<S: BackendStyle>(
        &mut self,
        from: (i32, i32),
        to: (i32, i32),
        style: &S,
    ) -> std::result::Result<(), DrawingErrorKind<Self::ErrorType>> {
        self.0.draw_line(from, to, style)
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> std::result::Result<(u32, u32), DrawingErrorKind<Self::ErrorType>> {
        let scale = scale(style) as u32;
        Ok((text.chars().count() as u32 * 8 * scale, 8 * scale))
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        at: (i32, i32),
    ) -> std::result::Result<(), DrawingErrorKind<Self::ErrorType>> {
        let scale = scale(style);
        let (width, height) = (text.chars().count() as i32 * 8 * scale, 8 * scale);
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Center => -width / 2,
            HPos::Right => -width,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -height / 2,
            VPos::Bottom => -height,
        };
        let color = style.color();
        for (index, letter) in text.chars().enumerate() {
            let Some(rows) = BASIC_LEGACY.get(letter as usize) else {
                continue;
            };
            for y in 0..height {
                for x in 0..8 * scale {
                    if rows[(y / scale) as usize] >> (x / scale) & 1 == 0 {
                        continue;
                    }
                    let (dx, dy) = (left + index as i32 * 8 * scale + x, top + y);
                    let (dx, dy) = match style.transform() {
                        FontTransform::None => (dx, dy),
                        FontTransform::Rotate90 => (-dy, dx),
                        FontTransform::Rotate180 => (-dx, -dy),
                        FontTransform::Rotate270 => (dy, -dx),
                    };
                    self.0.draw_pixel((at.0 + dx, at.1 + dy), color)?;
                }
            }
        }
        Ok(())
    }
}
