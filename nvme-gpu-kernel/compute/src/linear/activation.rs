//! Activations and their slopes, by what logistic function the caller has.

/// The logistic function of a number.
pub trait Logistic {
    /// 1 / (1 + e^-x).
    fn of(x: f32) -> f32;
}

/// What becomes of a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Activation {
    /// The sum.
    #[default]
    None = 0,
    /// The sum, or 0 for those below.
    Relu = 1,
    /// The sum times its logistic.
    Silu = 2,
    /// The sum times the share of a normal distribution below it, by the usual `tanh`.
    Gelu = 3,
}

/// The square root of 8 / pi: (1 + tanh(u)) / 2 is the logistic of 2 u.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = LINEAR * 0.044_715;

impl Activation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Relu, Self::Silu, Self::Gelu];

    /// The one with this number; unknown ones are none.
    #[inline(always)]
    pub fn of_number(number: u32) -> Self {
        match number {
            1 => Self::Relu,
            2 => Self::Silu,
            3 => Self::Gelu,
            _ => Self::None,
        }
    }

    /// What the logistic is of: these times the sum, and its cube.
    #[inline(always)]
    fn factors(self) -> (f32, f32) {
        match self {
            Self::Gelu => (LINEAR, CUBIC),
            _ => (1.0, 0.0),
        }
    }

    /// Of a sum. Without branches: kernels do it for many sums at once.
    #[inline(always)]
    pub fn of<L: Logistic>(self, sum: f32) -> f32 {
        let (linear, cubic) = self.factors();
        let soft = sum * L::of(sum * (linear + cubic * sum * sum));
        let least = if self == Self::Relu {
            0.0
        } else {
            f32::NEG_INFINITY
        };
        let hard = if sum < least { least } else { sum };
        match self {
            Self::None | Self::Relu => hard,
            Self::Silu | Self::Gelu => soft,
        }
    }

    /// Its slope at a sum; 0 at 0 for `Relu`.
    #[inline(always)]
    pub fn slope<L: Logistic>(self, sum: f32) -> f32 {
        let (linear, cubic) = self.factors();
        let share = L::of(sum * (linear + cubic * sum * sum));
        let soft = share + sum * share * (1.0 - share) * (linear + 3.0 * cubic * sum * sum);
        match self {
            Self::None => 1.0,
            Self::Relu => f32::from(u8::from(sum > 0.0)),
            Self::Silu | Self::Gelu => soft,
        }
    }
}
