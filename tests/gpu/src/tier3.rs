//! Tier 3 on GPUs that exist: rings and data in GPU memory, against a controller that is a kernel. See docs/tier3.md.

mod cells;
mod controller;
mod errors;
mod rig;
mod speed;

use crate::bench::Bench;
use crate::litmus::peer;
use crate::report::{End, Report};
use controller::Image;
use nvme_host::cuda::Gpu;
use std::cell::OnceCell;
use std::sync::Arc;

/// The GPU that plays the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrangement {
    /// The driver's.
    One,
    /// Another, by peer access.
    Two,
}

/// The controller's image for one arrangement, loaded when a test first needs it.
struct Stage<'b> {
    bench: &'b Bench,
    arrangement: Arrangement,
    image: OnceCell<Result<Image, String>>,
}

impl Stage<'_> {
    fn name(&self) -> &'static str {
        match self.arrangement {
            Arrangement::One => "one",
            Arrangement::Two => "two",
        }
    }

    fn image(&self) -> Result<&Image, String> {
        let load = || Image::load(&self.other()?);
        self.image.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn other(&self) -> Result<Arc<Gpu>, String> {
        let gpu = &self.bench.gpu;
        if self.arrangement == Arrangement::One {
            return Ok(Arc::clone(gpu));
        }
        let index = match gpu.index() {
            0 => 1,
            _ => 0,
        };
        let open = || -> nvme_host::Result<Arc<Gpu>> {
            let other = Gpu::open(index)?;
            gpu.reach(&other)?;
            other.reach(gpu)?;
            Ok(other)
        };
        open().map_err(|error| error.to_string())
    }

    /// Runs a test of `name` in this arrangement, or skips it if the arrangement is not possible.
    fn test(
        &self,
        report: &mut Report,
        name: &str,
        test: impl FnOnce(&Bench, &Image) -> Result<String, String>,
    ) {
        let name = format!("tier3/{}/{name}", self.name());
        report.case(&name, |_| match self.image() {
            Ok(image) => test(self.bench, image).into(),
            Err(why) if self.arrangement == Arrangement::Two => End::Skipped(why),
            Err(why) => End::Failed(why),
        });
    }
}

/// Runs every test, in both arrangements.
pub fn all(report: &mut Report, bench: &Bench) {
    for arrangement in [Arrangement::One, Arrangement::Two] {
        let stage = Stage {
            bench,
            arrangement,
            image: OnceCell::new(),
        };
        errors::all(report, &stage);
        cells::all(report, &stage);
        if arrangement == Arrangement::Two {
            litmus(report, &stage);
        }
        speed::all(report, &stage);
    }
}

/// Runs the shapes of docs/memory-model.md across the link. On one GPU they are the tests `litmus/.../device/gpu-gpu`.
fn litmus(report: &mut Report, stage: &Stage<'_>) {
    let pair = OnceCell::new();
    let options = report.options().clone();
    for case in peer::cases() {
        let words: Vec<String> = case.name().split('/').map(str::to_owned).collect();
        stage.test(report, &words[..3].join("/"), |bench, image| {
            let pair = pair.get_or_init(|| peer::Pair::new(&bench.gpu, &image.gpu));
            pair.as_ref()
                .map_err(Clone::clone)?
                .run(bench, &case, &options)
        });
    }
}
