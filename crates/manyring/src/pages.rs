//! Generates the files that a package ships beside the program: manual pages, shell completions and
//! the OpenAPI document.

use crate::cli::Cli;
use clap::CommandFactory;
use clap_complete::Shell;
use manyring_control as control;
use std::io;
use std::path::Path;

/// The shells, each with the folder of its completions.
const SHELLS: [(Shell, &str); 3] =
    [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")];

/// Writes `man/*.1`, `openapi.json` and a completion file for each of [`SHELLS`] into a folder.
///
/// # Errors
/// A file or folder cannot be written.
pub(crate) fn write(folder: &Path) -> io::Result<()> {
    let mut command = Cli::command();
    command.build();
    let man = folder.join("man");
    std::fs::create_dir_all(&man)?;
    clap_mangen::generate_to(command.clone(), &man)?;
    for (shell, name) in SHELLS {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder)?;
        clap_complete::generate_to(shell, &mut command, "manyring", &folder)?;
    }
    std::fs::write(folder.join("openapi.json"), control::openapi())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_shown_has_a_page_and_is_completed() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let read = |path: &str| std::fs::read_to_string(folder.path().join(path)).unwrap();
        let completions = ["bash/manyring.bash", "zsh/_manyring", "fish/manyring.fish"].map(read);
        let shown = Cli::command();
        let shown = shown.get_subcommands().filter(|command| !command.is_hide_set());
        for name in shown.map(|command| command.get_name().to_owned()) {
            let page = read(&format!("man/manyring-{name}.1"));
            assert!(page.starts_with(".ie") || page.contains(".TH"), "{page}");
            for text in &completions {
                assert!(text.contains(&name), "{name}");
            }
        }
        assert!(!folder.path().join("man/manyring-device.1").exists());
        assert!(read("man/manyring-blk.1").contains("blk\\-file"));
    }
}
