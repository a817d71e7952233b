use super::*;

/// Numbers that look random.
fn dice(seed: u64) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        ((state >> 33) % u64::from(below)) as u32
    }
}

fn threshold(ranks: &[u32], wanted: u32) -> RankThreshold {
    RankThreshold::of(wanted, |above, shift, wanted| {
        let mut bins = [0; BINS as usize];
        for bin in ranks.iter().filter_map(|rank| bin_of(*rank, above, shift)) {
            bins[bin as usize] += 1;
        }
        let group = |group: u32| {
            bins[(group * LANE_BINS) as usize..][..LANE_BINS as usize]
                .iter()
                .sum()
        };
        narrow(wanted, group, |bin| bins[bin as usize])
    })
}

#[test]
fn a_threshold_is_that_of_sorted_ranks() {
    let mut throw = dice(1);
    for round in 0..400u32 {
        let count = 1 + throw(300);
        // Some with many equal ranks, some with none.
        let range = [2, 50, 70_000, u32::MAX][round as usize % 4];
        let mut ranks: Vec<u32> = (0..count).map(|_| throw(range)).collect();
        if round % 5 == 0 {
            ranks[0] = u32::MAX;
        }
        let wanted = 1 + throw(count);
        let found = threshold(&ranks, wanted);
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let last = ranks[wanted as usize - 1];
        let above = ranks.iter().filter(|rank| **rank > last).count() as u32;
        let expected = RankThreshold {
            rank: last,
            equal: wanted - above,
        };
        assert_eq!(found, expected, "{wanted} of {count}");
    }
    assert_eq!(threshold(&[7, 8], 0), RankThreshold::NONE);
}

#[test]
fn ranks_have_the_order_of_bounds() {
    let bounds = [
        f32::NEG_INFINITY,
        -2.5,
        -1e-40,
        0.0,
        1e-40,
        3.0,
        f32::INFINITY,
    ];
    for pair in bounds.windows(2) {
        assert!(rank_of(pair[0]) < rank_of(pair[1]), "{pair:?}");
    }
    assert_eq!(rank_of(f32::NAN), FIRST);
    assert!(rank_of(f32::INFINITY) < FIRST);
}

#[test]
fn first_and_last_places_are_kept() {
    let choice = ChoosePages {
        keep: 5,
        first: 1,
        last: 2,
        ..ChoosePages::default()
    };
    let kept = |count: u32| -> Vec<u32> {
        (0..count)
            .filter(|place| choice.is_kept(*place, count))
            .collect()
    };
    assert_eq!(kept(8), [0, 6, 7]);
    assert_eq!(kept(1), [0]);
    assert_eq!(choice.wanted(8), Some(2));
    assert_eq!(choice.wanted(5), None);
}
