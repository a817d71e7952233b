//! The routers of published models: scores, a bias that selects and does not weigh, groups of experts, weights.

use nvme_compute_kernel::experts::{ChosenExpert, MOST_EXPERTS, NO_SLOT};
use nvme_compute_kernel::{index_of, ranked};
use nvme_host::{Error, Result};

/// The score of an expert, by its logit. Scores select experts and weigh them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts, as in Qwen3 and Mixtral.
    #[default]
    Softmax,
    /// Softmax over the selected experts, as in gpt-oss. Logits select.
    SoftmaxOfChosen,
    /// Sigmoid, as in DeepSeek-V3, GLM-4.5 and Kimi-K2.
    Sigmoid,
    /// Square root of softplus, as in DeepSeek-V4.
    SqrtSoftplus,
}

/// The rule by which a router selects experts and weighs them.
///
/// Of equal scores the expert with the smaller number is selected, and of equal groups the first one. A score that is NaN
/// is below every number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRule {
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a token.
    pub choices: u32,
    /// Score of an expert.
    pub score: RouterScore,
    /// Groups of consecutive experts, of one size; 1 for none.
    pub groups: u32,
    /// Groups whose experts may be selected.
    pub kept_groups: u32,
    /// Scores that are added up for a group, the largest ones: 2 as in DeepSeek-V3, or 1.
    pub best_of_group: u32,
    /// True if weights are divided by their sum.
    pub normalises: bool,
    /// Added to that sum.
    pub epsilon: f32,
    /// Multiplies the weights.
    pub factor: f32,
}

impl RouterRule {
    /// Returns the rule that selects by the logits alone: softmax over all experts, without groups.
    pub fn softmax(experts: u32, choices: u32) -> Self {
        Self {
            experts,
            choices,
            score: RouterScore::Softmax,
            groups: 1,
            kept_groups: 1,
            best_of_group: 1,
            normalises: false,
            epsilon: 0.0,
            factor: 1.0,
        }
    }

    /// # Errors
    /// [`Error::Usage`] for numbers of experts and groups that cannot be.
    pub fn check(&self) -> Result<()> {
        let Self {
            experts,
            choices,
            groups,
            kept_groups,
            best_of_group,
            ..
        } = *self;
        if choices == 0 || choices > experts || experts > MOST_EXPERTS {
            return Err(Error::usage(
                format!("{choices} experts cannot be chosen of {experts}"),
                format!("use {MOST_EXPERTS} experts at most, and 1 of them or more"),
            ));
        }
        let is_whole = groups > 0 && experts.is_multiple_of(groups);
        let size = if is_whole { experts / groups } else { 0 };
        if !is_whole || kept_groups == 0 || kept_groups > groups || kept_groups * size < choices {
            return Err(Error::usage(
                format!(
                    "{kept_groups} of {groups} groups of {experts} experts do not have {choices} experts"
                ),
                "use groups of one size, and keep enough of them",
            ));
        }
        if best_of_group == 0 || best_of_group > size {
            return Err(Error::usage(
                format!("a group of {size} experts has no best {best_of_group}"),
                "use 1 or 2, as the model does",
            ));
        }
        Ok(())
    }

    /// Selects the experts of each token by `logits`, and weighs them. `bias`, a number for each expert, is added to the
    /// scores that select, and not to the weights.
    ///
    /// # Errors
    /// [`Error::Usage`] for a rule that cannot be, logits of no whole tokens, and a bias of another length.
    pub fn route(&self, logits: &[f32], bias: Option<&[f32]>) -> Result<Vec<ChosenExpert>> {
        self.check()?;
        self.check_logits(logits)?;
        let experts = self.experts as usize;
        if let Some(bias) = bias
            && bias.len() != experts
        {
            return Err(Error::usage(
                format!("the bias has {} numbers for {experts} experts", bias.len()),
                "use a number for each expert",
            ));
        }
        let mut all = Vec::new();
        for logits in logits.chunks(experts) {
            let scores = self.scores(logits);
            let mut ranks = self.ranks(logits, &scores, bias);
            ranks.sort_unstable_by(|a, b| b.cmp(a));
            let chosen = ranks.iter().take(self.choices as usize);
            let chosen: Vec<u32> = chosen.map(|rank| index_of(*rank)).collect();
            self.weigh_token(logits, &scores, &chosen, &mut all);
        }
        Ok(all)
    }

    /// Weighs the experts `chosen`, as many for each token as the rule says: those of a table by the token's id.
    ///
    /// # Errors
    /// As [`route`](Self::route); for an expert that is not there, with the token.
    pub fn weigh(&self, logits: &[f32], chosen: &[u32]) -> Result<Vec<ChosenExpert>> {
        self.check()?;
        self.check_logits(logits)?;
        let tokens = logits.len() / self.experts as usize;
        let choices = self.choices as usize;
        if chosen.len() != tokens * choices {
            return Err(Error::usage(
                format!("{} experts are given for {tokens} tokens", chosen.len()),
                format!("use {choices} for each token"),
            ));
        }
        if let Some(at) = chosen.iter().position(|one| *one >= self.experts) {
            return Err(Error::usage(
                format!(
                    "token {} has the expert {} of {}",
                    at / choices,
                    chosen[at],
                    self.experts
                ),
                "use the table of the model",
            ));
        }
        let mut all = Vec::new();
        let each = logits
            .chunks(self.experts as usize)
            .zip(chosen.chunks(choices));
        for (logits, chosen) in each {
            self.weigh_token(logits, &self.scores(logits), chosen, &mut all);
        }
        Ok(all)
    }

    fn check_logits(&self, logits: &[f32]) -> Result<()> {
        match logits.len().is_multiple_of(self.experts as usize) {
            true => Ok(()),
            false => Err(Error::usage(
                format!(
                    "the number of logits, {}, is not a multiple of {}, the number of experts",
                    logits.len(),
                    self.experts
                ),
                "use as many logits as experts for each token",
            )),
        }
    }

    fn scores(&self, logits: &[f32]) -> Vec<f32> {
        match self.score {
            RouterScore::Softmax => super::probabilities(logits),
            RouterScore::SoftmaxOfChosen => logits.to_vec(),
            RouterScore::Sigmoid => logits.iter().copied().map(sigmoid).collect(),
            RouterScore::SqrtSoftplus => logits.iter().map(|x| softplus(*x).sqrt()).collect(),
        }
    }

    /// Returns the rank of each expert that may be selected.
    fn ranks(&self, logits: &[f32], scores: &[f32], bias: Option<&[f32]>) -> Vec<u64> {
        // Logits order as their softmax does, and tell apart what it rounds to one number.
        let by_logits = self.score == RouterScore::Softmax && bias.is_none() && self.groups == 1;
        let selects = if by_logits { logits } else { scores };
        let selects: Vec<f32> = match bias {
            Some(bias) => selects
                .iter()
                .zip(bias)
                .map(|(score, bias)| score + bias)
                .collect(),
            None => selects.to_vec(),
        };
        let size = (self.experts / self.groups) as usize;
        let of_group = |group: &[f32]| {
            let mut largest: Vec<u64> = group.iter().map(|score| ranked(*score, 0)).collect();
            largest.sort_unstable_by(|a, b| b.cmp(a));
            let best = largest.iter().take(self.best_of_group as usize);
            best.map(|rank| score_of(*rank)).sum::<f32>()
        };
        let mut groups: Vec<u64> = match self.groups {
            1 => vec![ranked(0.0, 0)],
            _ => selects
                .chunks(size)
                .zip(0..)
                .map(|(one, at)| ranked(of_group(one), at))
                .collect(),
        };
        groups.sort_unstable_by(|a, b| b.cmp(a));
        let kept = groups.iter().take(self.kept_groups as usize);
        let kept = kept.flat_map(|rank| {
            let first = index_of(*rank) as usize * size;
            first..first + size
        });
        kept.map(|expert| ranked(selects[expert], expert as u32))
            .collect()
    }

    fn weigh_token(
        &self,
        logits: &[f32],
        scores: &[f32],
        chosen: &[u32],
        all: &mut Vec<ChosenExpert>,
    ) {
        let mut weights: Vec<f32> = match self.score {
            RouterScore::SoftmaxOfChosen => {
                let of_chosen: Vec<f32> = chosen.iter().map(|one| logits[*one as usize]).collect();
                super::probabilities(&of_chosen)
            }
            _ => chosen.iter().map(|one| scores[*one as usize]).collect(),
        };
        if self.normalises {
            let total = weights.iter().sum::<f32>() + self.epsilon;
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
        all.extend(
            chosen
                .iter()
                .zip(weights)
                .map(|(expert, weight)| ChosenExpert {
                    expert: *expert,
                    slot: NO_SLOT,
                    weight: weight * self.factor,
                    reserved: 0,
                }),
        );
    }
}

/// Returns the value in a result of [`ranked`]; NaN for that of NaN.
fn score_of(rank: u64) -> f32 {
    let order = (rank >> 32) as u32;
    f32::from_bits(match order >> 31 {
        _ if order == 0 => f32::NAN.to_bits(),
        1 => order & !(1 << 31),
        _ => !order,
    })
}

/// Returns log(1 + e^x); from 20 on x itself, as torch does.
fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => x.exp().ln_1p(),
    }
}

/// Returns 1 / (1 + e^-x).
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(chosen: &[ChosenExpert]) -> Vec<u32> {
        chosen.iter().map(|one| one.expert).collect()
    }

    /// Scores of DeepSeek-V3: eight experts in four groups.
    fn grouped() -> RouterRule {
        RouterRule {
            score: RouterScore::Sigmoid,
            groups: 4,
            kept_groups: 2,
            best_of_group: 2,
            normalises: true,
            epsilon: 1e-20,
            factor: 2.5,
            ..RouterRule::softmax(8, 3)
        }
    }

    #[test]
    fn a_bias_selects_and_does_not_weigh() {
        let rule = RouterRule {
            score: RouterScore::Sigmoid,
            ..RouterRule::softmax(3, 1)
        };
        let logits = [0.0, 0.0, 1.0];
        assert_eq!(numbers(&rule.route(&logits, None).unwrap()), [2]);
        let chosen = rule.route(&logits, Some(&[0.0, 5.0, 0.0])).unwrap();
        assert_eq!((numbers(&chosen), chosen[0].weight), (vec![1], 0.5));
    }

    #[test]
    fn experts_of_the_best_groups_alone_are_selected() {
        // The largest score is in a group whose two best are not among the largest.
        let logits = [9.0, -9.0, 2.0, 2.0, 1.0, 1.5, 0.0, -5.0];
        let chosen = grouped().route(&logits, None).unwrap();
        assert_eq!(numbers(&chosen), [2, 3, 5]);
        let total: f32 = chosen.iter().map(|one| one.weight).sum();
        assert!((total - 2.5).abs() < 1e-6);
    }

    #[test]
    fn of_equal_scores_the_first_is_selected_and_nan_the_last() {
        let rule = RouterRule::softmax(4, 2);
        assert_eq!(numbers(&rule.route(&[1.0; 4], None).unwrap()), [0, 1]);
        let logits = [f32::NAN, -3.0, -2.0, f32::NEG_INFINITY];
        let sigmoid = RouterRule {
            score: RouterScore::Sigmoid,
            ..rule
        };
        assert_eq!(numbers(&sigmoid.route(&logits, None).unwrap()), [2, 1]);
        let equal = grouped().route(&[0.0; 8], None).unwrap();
        assert_eq!(numbers(&equal), [0, 1, 2]);
    }

    #[test]
    fn experts_of_a_table_are_weighed_by_their_scores() {
        let rule = RouterRule {
            score: RouterScore::SqrtSoftplus,
            normalises: true,
            ..RouterRule::softmax(4, 2)
        };
        let chosen = rule.weigh(&[30.0, 0.0, 0.0, 0.0], &[3, 0]).unwrap();
        assert_eq!(numbers(&chosen), [3, 0]);
        let (small, large) = (2f32.ln().sqrt(), 30f32.sqrt());
        assert!((chosen[0].weight - small / (small + large)).abs() < 1e-6);
        let error = rule
            .weigh(&[0.0; 8], &[0, 1, 2, 4])
            .unwrap_err()
            .to_string();
        assert!(error.contains("token 1 has the expert 4 of 4"), "{error}");
        assert!(rule.weigh(&[0.0; 8], &[0, 1]).is_err());
    }

    #[test]
    fn rules_that_cannot_be_are_refused() {
        let good = grouped();
        for rule in [
            RouterRule { choices: 0, ..good },
            RouterRule { choices: 9, ..good },
            RouterRule { groups: 3, ..good },
            RouterRule { groups: 0, ..good },
            RouterRule {
                kept_groups: 1,
                ..good
            },
            RouterRule {
                kept_groups: 5,
                ..good
            },
            RouterRule {
                best_of_group: 3,
                ..good
            },
            RouterRule {
                best_of_group: 0,
                ..good
            },
            RouterRule {
                experts: 4097,
                ..good
            },
        ] {
            assert!(rule.route(&[], None).is_err(), "{rule:?}");
        }
        assert!(good.route(&[0.0; 9], None).is_err());
        assert!(good.route(&[0.0; 8], Some(&[0.0; 7])).is_err());
    }
}
