//! The host's lanes do what the PTX manual says of a GPU's.
// UNSAFETY: stores to an address that is refused.
#![allow(unsafe_code)]

use super::{HostGrid, LaunchTurn, RunningLaunch};
use crate::arch;
use crate::groups::{GpuThread, WholeBlock, converged};
use nvme_core::group::{ExecContext, GroupOp, LoneThread, ThreadGroup};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Returns a grid whose clock advances with each reading, so that sleeping lanes wake.
fn grid(blocks: u32, threads: u32) -> HostGrid {
    let now_ns = Cell::new(0);
    HostGrid {
        blocks,
        threads,
        at_once: 2,
        clock: Rc::new(move || {
            now_ns.set(now_ns.get() + 1);
            now_ns.get()
        }),
    }
}

/// Runs `made` in each thread of a launch and returns the results in the order of the threads' numbers.
fn each<R: Clone + 'static>(blocks: u32, threads: u32, made: impl Fn() -> R + 'static) -> Vec<R> {
    let all = Rc::new(RefCell::new(Vec::new()));
    let of = all.clone();
    let kernel = move || {
        let number = arch::block() * arch::block_threads() + arch::thread();
        let one = made();
        of.borrow_mut().push((number, one));
    };
    RunningLaunch::new(grid(blocks, threads), kernel).run(|| {});
    let mut all = all.borrow().clone();
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, one)| one).collect()
}

#[test]
fn collectives_give_each_lane_what_the_manual_says() {
    let made = each(1, 32, || {
        let lane = arch::lane();
        [
            arch::ballot(arch::FULL, lane.is_multiple_of(3)),
            arch::shuffle(arch::FULL, lane * 10, 31 - lane),
            arch::shuffle(arch::FULL, lane * 10, 32 + 5),
            arch::shuffle_tile(lane, 3),
            arch::butterfly(arch::FULL, lane, 5),
            arch::same(arch::FULL, u64::from(lane / 8)),
            arch::lanes_below(),
        ]
    });
    let thirds = (0..32).filter(|lane| lane % 3 == 0);
    let thirds = thirds.fold(0, |mask, lane| mask | 1 << lane);
    for (lane, made) in (0u32..).zip(made) {
        let like = [
            thirds,
            (31 - lane) * 10,
            50,
            lane / 8 * 8 + 3,
            lane ^ 5,
            0xFF << (lane / 8 * 8),
            (1 << lane) - 1,
        ];
        assert_eq!(made, like, "lane {lane}");
    }
}

#[test]
fn lanes_that_exited_are_not_waited_for() {
    let made = each(1, 32, || {
        if arch::lane() >= 8 {
            return 0;
        }
        arch::sync_warp(arch::FULL);
        arch::ballot(arch::FULL, true)
    });
    assert_eq!(
        made[..9],
        [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0]
    );
}

#[test]
fn halves_of_a_warp_go_their_own_ways() {
    let made = each(1, 32, || {
        let lane = arch::lane();
        let mask = if lane < 16 { 0xFFFF } else { 0xFFFF_0000 };
        let mut sum = 0;
        for turn in 0..if lane < 16 { 3 } else { 5 } {
            sum += arch::shuffle(mask, lane + turn, if lane < 16 { 3 } else { 19 });
        }
        arch::sync_warp(arch::FULL);
        sum
    });
    assert_eq!((made[0], made[31]), (3 + 4 + 5, 19 + 20 + 21 + 22 + 23));
}

/// Returns the size of the group and the lane of its leader.
struct Count;

impl GroupOp for Count {
    type Output = (u32, u32);

    fn run<G: ThreadGroup>(self, group: &G) -> (u32, u32) {
        let before = group.vote(true).before;
        assert_eq!(before, group.rank());
        (group.size(), group.broadcast(arch::lane()))
    }
}

#[test]
fn lanes_that_diverged_meet_by_key() {
    let made = each(1, 64, || {
        let lane = arch::lane();
        let key = u64::from(lane % 2);
        match lane {
            // This lane calls from another location, so it forms a group alone.
            7 => converged(LoneThread, 9, Count),
            _ => GpuThread.converged(key, Count),
        }
    });
    for warp in made.chunks(32) {
        assert_eq!(warp[7], (1, 7));
        assert_eq!((warp[0], warp[30]), ((16, 0), (16, 0)));
        assert_eq!((warp[1], warp[31]), ((15, 1), (15, 1)));
    }
}

#[test]
fn a_block_votes_and_broadcasts() {
    let made = each(3, 96, || {
        let block = WholeBlock::here();
        let vote = block.vote(arch::thread() >= 33);
        let value = block.broadcast(arch::block() * 100 + arch::thread());
        (vote.total, vote.before, vote.leading, value)
    });
    for (number, made) in (0u32..).zip(made) {
        let thread = number % 96;
        let before = thread.saturating_sub(33);
        assert_eq!(made, (63, before, 0, number / 96 * 100), "thread {number}");
    }
}

#[test]
fn a_seed_repeats_the_order() {
    let order = |seed: u64| {
        let told = Rc::new(RefCell::new(Vec::new()));
        let of = told.clone();
        let kernel = move || {
            for _ in 0..3 {
                of.borrow_mut().push(arch::thread());
                arch::sync_warp(arch::FULL);
                arch::sleep_ns(1);
            }
        };
        let mut launch = RunningLaunch::new(grid(2, 64), kernel);
        let mut state = seed;
        let mut pick = |most: u32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 33) as u32 % most
        };
        loop {
            match launch.turn(1, &mut pick) {
                LaunchTurn::Ran => {}
                LaunchTurn::Asleep => launch.wake(),
                LaunchTurn::Ended => break,
            }
        }
        told.borrow().clone()
    };
    assert_eq!(order(7), order(7));
    assert_ne!(order(7), order(8));
}

#[test]
#[should_panic(
    expected = "lanes wait for each other: block 0 warp 0: lanes 0xfffffff7 in vote.ballot of 0xffffffff at"
)]
fn a_collective_that_a_lane_leaves_out_is_found() {
    each(1, 32, || {
        if arch::lane() != 3 {
            arch::ballot(arch::FULL, true);
        }
        arch::shuffle(arch::FULL, 0, 0)
    });
}

#[test]
#[should_panic(expected = "lane 4 is not in its own mask")]
fn a_lane_outside_of_its_mask_is_found() {
    each(1, 32, || arch::ballot(0xF, true));
}

#[test]
#[should_panic(expected = "a misaligned address")]
fn a_misaligned_store_is_found() {
    each(1, 32, || {
        let words = [0u64; 2];
        let at = core::ptr::from_ref(&words).addr() as u64;
        // SAFETY: the call panics before it stores.
        unsafe { arch::store_u32(at + 2, 1) };
    });
}

#[test]
fn an_exchange_gives_each_lane_the_values_of_all() {
    let made = each(1, 64, || {
        let first = arch::exchange(u64::from(arch::thread()) << 40);
        let second = arch::exchange(first[31]);
        (
            first,
            second,
            arch::shuffle64(first[3] + u64::from(arch::lane()), 9),
        )
    });
    for (thread, (first, second, shuffled)) in made.into_iter().enumerate() {
        let warp = thread as u64 / 32 * 32;
        let all: [u64; 32] = std::array::from_fn(|lane| (warp + lane as u64) << 40);
        assert_eq!(first, all, "thread {thread}");
        assert_eq!(second, [all[31]; 32], "thread {thread}");
        assert_eq!(shuffled, all[3] + 9, "thread {thread}");
    }
}

#[test]
fn lanes_that_exited_have_no_part_in_an_exchange() {
    let made = each(1, 32, || match arch::lane() {
        0 => [0; 32],
        lane => arch::exchange(lane.into()),
    });
    assert_eq!(made[5][1..], made[31][1..]);
    assert_eq!((made[5][1], made[5][31]), (1, 31));
}

#[test]
fn a_step_of_the_warp_runs_once_with_the_values_of_all_lanes() {
    thread_local! {
        static RUNS: Cell<u32> = const { Cell::new(0) };
    }
    let made = each(1, 64, || {
        let mut sum = (u64::from(arch::thread()), 0u64);
        let address = (&raw mut sum).expose_provenance() as u64;
        arch::joint(address, |all| {
            RUNS.set(RUNS.get() + 1);
            let at = |address: u64| {
                core::ptr::with_exposed_provenance_mut::<(u64, u64)>(address as usize)
            };
            // SAFETY: each lane waits with its numbers on its stack.
            let mut numbers = all.map(|address| unsafe { &mut *at(address) });
            let total = numbers.iter().map(|of| of.0).sum();
            numbers.iter_mut().for_each(|of| of.1 = total);
        });
        sum.1
    });
    assert_eq!((made[0], made[31]), (31 * 16, 31 * 16));
    assert_eq!((made[32], made[63]), (31 * 16 + 32 * 32, 31 * 16 + 32 * 32));
    assert_eq!(RUNS.get(), 2);
}

/// A copy is visible only after the wait for it; before that the kernel may find either value.
#[test]
fn copies_take_place_between_their_start_and_their_wait() {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let of = seen.clone();
    let kernel = move || {
        let lane = arch::lane();
        let (shared, bytes) = arch::dynamic_shared();
        assert_eq!(bytes, 32 * 16);
        let to = shared + u64::from(lane) * 16;
        let number = |at: u64| {
            // SAFETY: the address lies in the 512 bytes of shared memory of the block.
            unsafe { arch::load_u32(at) }
        };
        let source = [lane + 1, 7, 7, 7];
        let from = source.as_ptr().expose_provenance() as u64;
        // SAFETY: the source stays until the wait.
        unsafe { arch::start_copy(to, from, (4, 12)) };
        arch::commit_copies();
        arch::commit_copies();
        arch::wait_for_copies(2);
        let early = number(to);
        arch::wait_for_copies(1);
        of.borrow_mut()
            .push((early == lane + 1, number(to) == lane + 1));
        assert_eq!([4, 8, 12].map(|at| number(to + at)), [0; 3]);
    };
    RunningLaunch::new(grid(1, 32), kernel)
        .with_shared(32 * 16)
        .run(|| {});
    let seen = seen.borrow();
    assert!(seen.iter().all(|(_, late)| *late));
    assert_eq!(seen.iter().filter(|(early, _)| *early).count(), 16);
}
