//! `Sandbox`: which rights a device process gives up (`daemon.sandbox`, `--sandbox`).

/// Which rights a device process gives up before it serves a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sandbox {
    /// A device process keeps its rights.
    None,
    /// A device process gives up all rights that this kernel can take from it.
    Auto,
    /// As `Auto`, but a device process exits at once if the kernel cannot take one of these rights.
    Seccomp,
}

impl Sandbox {
    /// Returns the value of `--sandbox` that chooses this.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::Seccomp => "seccomp",
        }
    }
}
