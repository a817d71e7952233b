//! Activations and their derivatives, generic over the implementation of the logistic function.

/// The logistic function of a number.
///
/// The GPU uses its approximate exponential, the reference the exact one; the activations are written once,
/// in terms of this function.
pub trait LogisticFunction {
    /// Returns 1 / (1 + e^-x).
    fn of(x: f32) -> f32;
}

/// The activation of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum ActivationKind {
    /// Identity.
    #[default]
    None = 0,
    /// `max(x, 0)`.
    Relu = 1,
    /// `x` times its logistic (SiLU).
    Silu = 2,
    /// Gaussian error linear unit, by the usual `tanh` approximation.
    Gelu = 3,
}

/// Twice the square root of 2 / pi: (1 + tanh(u)) / 2 is the logistic of 2 u.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = LINEAR * 0.044_715;

impl ActivationKind {
    /// All activations.
    pub const ALL: [Self; 4] = [Self::None, Self::Relu, Self::Silu, Self::Gelu];

    /// Returns the activation with this number; for unknown ones the identity.
    #[inline(always)]
    pub fn of_number(number: u32) -> Self {
        match number {
            1 => Self::Relu,
            2 => Self::Silu,
            3 => Self::Gelu,
            _ => Self::None,
        }
    }

    /// Returns the factors of the sum and of its cube in the argument of the logistic function.
    #[inline(always)]
    fn factors(self) -> (f32, f32) {
        match self {
            Self::Gelu => (LINEAR, CUBIC),
            _ => (1.0, 0.0),
        }
    }

    /// Returns the activation of a sum. Without branches, since kernels compute it for many sums at once.
    #[inline(always)]
    pub fn of<L: LogisticFunction>(self, sum: f32) -> f32 {
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

    /// Returns the derivative at a sum; 0 at 0 for `Relu`.
    #[inline(always)]
    pub fn slope<L: LogisticFunction>(self, sum: f32) -> f32 {
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
