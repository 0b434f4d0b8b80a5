//! Whether a scenario kept what it promises: a line behind its tables, and the program's status.

/// The verdict on a scenario that makes promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Everything ran; nothing is judged.
    Smoke,
    /// Every promise was kept, in words.
    Kept(String),
    /// The promises that were broken, each in words.
    Broken(Vec<String>),
}

impl Verdict {
    /// The verdict on these broken promises; what is said if there are none.
    pub(crate) fn new(is_smoke: bool, kept: impl Into<String>, broken: Vec<String>) -> Self {
        match (is_smoke, broken.is_empty()) {
            (true, _) => Self::Smoke,
            (false, true) => Self::Kept(kept.into()),
            (false, false) => Self::Broken(broken),
        }
    }

    /// The promises that were broken.
    pub(crate) fn broken(&self) -> &[String] {
        if let Self::Broken(broken) = self { broken } else { &[] }
    }

    /// The words for promises of which each was kept.
    pub(crate) fn kept(&self) -> Option<&str> {
        if let Self::Kept(kept) = self { Some(kept) } else { None }
    }

    /// Prints the verdict, if people read it.
    ///
    /// # Errors
    /// A promise was broken; the words say which.
    pub(crate) fn print(self, json: bool) -> Result<(), String> {
        let kept = match self {
            Self::Smoke => "nothing is judged in a smoke test".to_owned(),
            Self::Kept(kept) => kept,
            Self::Broken(broken) => return Err(broken.join("; ")),
        };
        if !json {
            println!("verdict: {kept}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_promise_is_an_error_and_a_smoke_test_judges_nothing() {
        let broken = || vec!["a: 0.5x".to_owned(), "b: late".to_owned()];
        let print = |is_smoke, broken| Verdict::new(is_smoke, "kept", broken).print(true);
        assert_eq!(print(false, broken()), Err("a: 0.5x; b: late".to_owned()));
        assert_eq!(print(false, Vec::new()), Ok(()));
        assert_eq!(print(true, broken()), Ok(()));
        assert_eq!(Verdict::new(false, "kept", Vec::new()), Verdict::Kept("kept".to_owned()));
    }
}
