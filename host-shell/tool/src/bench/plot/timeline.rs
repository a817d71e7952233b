//! Timeline of a pipeline as a picture: reads, products, and the batches of each buffer.

use nvme_course::pipeline::trace::{PipelineTrace, SpanWork};
use plotters::coord::Shift;
use plotters::prelude::*;

/// Spans of a timeline to draw.
pub struct TimelinePlot<'t> {
    pub title: &'t str,
    pub trace: &'t PipelineTrace,
}

/// Half the height of a bar; a row is 1.
const HALF: f64 = 0.35;

impl TimelinePlot<'_> {
    pub fn draw<B: DrawingBackend>(
        &self,
        panel: &DrawingArea<B, Shift>,
    ) -> std::result::Result<(), String> {
        let spans = &self.trace.spans;
        let begin = spans
            .iter()
            .map(|span| span.begin_us)
            .fold(f64::MAX, f64::min);
        let end = spans.iter().map(|span| span.end_us).fold(0.0, f64::max);
        let ms = |us: f64| (us - begin.min(end)) / 1e3;
        let slots = spans.iter().map(|span| span.slot + 1).max().unwrap_or(0);
        // Rows from the bottom: the buffers, the last one first; products; reads.
        let top = f64::from(slots) + 2.0;
        let share = self.trace.overlap().share() * 100.0;
        let caption = format!(
            "{}: {share:.0} % of the shorter one beside the other",
            self.title
        );
        let text = |error: DrawingAreaErrorKind<B::ErrorType>| error.to_string();
        let mut chart = ChartBuilder::on(panel)
            .caption(caption, ("sans-serif", 22))
            .margin(16)
            .margin_right(48)
            .x_label_area_size(48)
            .y_label_area_size(16)
            .build_cartesian_2d(0.0..ms(end).max(0.001), 0.0..top)
            .map_err(text)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .y_labels(0)
            .x_desc("ms")
            .label_style(("sans-serif", 14))
            .draw()
            .map_err(text)?;
        let bars = spans.iter().flat_map(|span| {
            let (first, color) = match span.work {
                SpanWork::Read => (top - 0.5, BLUE),
                SpanWork::Compute => (top - 1.5, RED),
            };
            let own = top - 2.5 - f64::from(span.slot);
            [first, own].map(|middle| {
                let corners = [
                    (ms(span.begin_us), middle - HALF),
                    (ms(span.end_us), middle + HALF),
                ];
                Rectangle::new(corners, color.mix(0.7).filled())
            })
        });
        chart.draw_series(bars).map_err(text)?;
        let names = (0..slots + 2).map(|row| {
            let name = match row {
                0 => "reads".to_owned(),
                1 => "products".to_owned(),
                slot => format!("buffer {}", slot - 2),
            };
            let place = (0.0, top - f64::from(row));
            Text::new(name, place, ("sans-serif", 14).into_font())
        });
        chart.draw_series(names).map_err(text)?;
        Ok(())
    }
}
