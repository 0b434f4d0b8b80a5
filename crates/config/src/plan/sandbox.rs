//! `Sandbox`: which rights a device process gives up (`daemon.sandbox`, `--sandbox`).

/// How much a device process gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sandbox {
    /// A device process keeps its rights.
    None,
    /// A device process gives up all rights that this kernel can take from it.
    Auto,
    /// As `Auto`, but a device process ends at once if the kernel cannot take one of them.
    Seccomp,
}

impl Sandbox {
    /// Its name as an option.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::Seccomp => "seccomp",
        }
    }
}
