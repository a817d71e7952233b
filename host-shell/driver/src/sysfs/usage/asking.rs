//! Questions to the system that may never be answered: accessing a file of an unreachable server blocks the
//! thread.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// Deadline of an answer. A local file system answers within microseconds; one of an unreachable server may
/// never do so, and `doctor` or `bind` would hang with it.
const PATIENCE: Duration = Duration::from_secs(2);

type Question = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The thread that asks for this one, until it was kept waiting.
    static ASKER: RefCell<Option<Sender<Question>>> = const { RefCell::new(None) };
}

/// Returns the answer to `question`, or `None` if it takes longer than the patience. A thread that still waits then is
/// left behind; it ends with the process.
pub(super) fn ask<T: Send + 'static>(question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    ask_within(PATIENCE, question)
}

fn ask_within<T: Send + 'static>(
    patience: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, answer) = channel();
    let boxed: Question = Box::new(move || {
        // If the answer is too late, nobody receives it any more.
        let _ = tell.send(question());
    });
    ASKER.with_borrow_mut(|asker| {
        let sender = match asker.take() {
            Some(sender) => sender,
            None => start()?,
        };
        sender.send(boxed).ok()?;
        let said = answer.recv_timeout(patience).ok()?;
        *asker = Some(sender);
        Some(said)
    })
}

fn start() -> Option<Sender<Question>> {
    let (sender, questions): (Sender<Question>, Receiver<Question>) = channel();
    let thread = thread::Builder::new().name("asking".to_owned());
    let run = move || questions.iter().for_each(|question| question());
    thread.spawn(run).ok().map(|_| sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_answered_is_given_up_and_the_next_question_is_answered() {
        assert_eq!(ask(|| 7), Some(7));
        let (end, never) = channel::<()>();
        let waiting = move || never.recv().is_ok();
        assert_eq!(ask_within(Duration::from_millis(20), waiting), None);
        assert_eq!(ask(|| 8), Some(8));
        // The thread that waits is left behind until here.
        drop(end);
    }

    #[test]
    fn one_thread_answers_one_question_after_the_other() {
        let first = ask(|| thread::current().id());
        assert_eq!(ask(|| thread::current().id()), first);
        assert_ne!(first, Some(thread::current().id()));
    }
}
