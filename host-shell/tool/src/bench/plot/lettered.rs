//! Text in bitmaps from an 8x8 font: no font files are needed.

use font8x8::legacy::BASIC_LEGACY;
use plotters::prelude::*;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendStyle, BackendTextStyle, DrawingErrorKind};

/// A bitmap whose text comes from a built-in font.
pub struct LetteredBitmap<'a>(pub BitMapBackend<'a>);

/// Returns the pixels per pixel of a letter: titles have twice the font's size.
fn scale(style: &impl BackendTextStyle) -> i32 {
    if style.size() >= 20.0 { 2 } else { 1 }
}

impl DrawingBackend for LetteredBitmap<'_> {
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
