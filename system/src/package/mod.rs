//! The Debian package, from a program that is built: what lies where, and who owns the service.

use crate::command::{child, output, text};
use crate::{Context, Outcome, check};
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// The contents of a Debian package.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The program, stripped.
    pub program: PathBuf,
    /// The folder that `manyring pages` of this version has written.
    pub pages: PathBuf,
    /// The libraries that it needs, as Debian names them.
    pub depends: String,
    /// Its version.
    pub version: String,
    /// The machine that it runs on, as Debian names it: `amd64`, `arm64`.
    pub architecture: &'static str,
    /// How it is packed: `xz`, or `gzip` where that is to be quick.
    pub compression: &'static str,
}

/// The root of the source.
fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

const COPYRIGHT: (&str, &str, bool) =
    ("contrib/deb/copyright", "usr/share/doc/manyring/copyright", false);
/// The changes that operators notice; and the list of versions that Debian's tools read.
const NEWS: (&str, &str, bool) = ("CHANGELOG.md", "usr/share/doc/manyring/NEWS", false);
const CHANGELOG: (&str, &str, bool) =
    ("contrib/deb/changelog", "usr/share/doc/manyring/changelog", false);

/// Files of the source, where they go, and whether they are programs.
const FILES: [(&str, &str, bool); 17] = [
    ("contrib/deb/manyring.toml", "etc/manyring/manyring.toml", false),
    ("contrib/xen/block-manyring", "etc/xen/scripts/block-manyring", true),
    ("contrib/systemd/manyring.service", "lib/systemd/system/manyring.service", false),
    ("contrib/systemd/manyring@.service", "lib/systemd/system/manyring@.service", false),
    ("contrib/systemd/manyring@.socket", "lib/systemd/system/manyring@.socket", false),
    ("contrib/deb/sysusers.conf", "usr/lib/sysusers.d/manyring.conf", false),
    ("contrib/deb/lintian-overrides", "usr/share/lintian/overrides/manyring", false),
    COPYRIGHT,
    NEWS,
    CHANGELOG,
    ("examples/50-manyring-blk.json", "usr/share/qemu/vhost-user/50-manyring-blk.json", false),
    ("examples/50-manyring-net.json", "usr/share/qemu/vhost-user/50-manyring-net.json", false),
    ("examples/blk.toml", "usr/share/doc/manyring/examples/blk.toml", false),
    ("examples/net.toml", "usr/share/doc/manyring/examples/net.toml", false),
    ("contrib/xen/guest.cfg", "usr/share/doc/manyring/examples/guest.cfg", false),
    (
        "contrib/prometheus/manyring.rules.yml",
        "usr/share/doc/manyring/examples/manyring.rules.yml",
        false,
    ),
    ("contrib/grafana/manyring.json", "usr/share/doc/manyring/examples/grafana.json", false),
];

/// Files that an operator may change, and that an upgrade keeps.
const CONFIGURATION: &str = "/etc/manyring/manyring.toml\n/etc/xen/scripts/block-manyring\n";

/// Makes `manyring_VERSION_ARCHITECTURE.deb` in a folder; `scratch` is empty.
///
/// # Errors
/// The system's; or dpkg-deb is missing.
pub fn deb(contents: &Contents, scratch: &Path, folder: &Path) -> Outcome<PathBuf> {
    let root = scratch.join("deb");
    for (from, to, is_program) in FILES {
        put(&source().join(from), &root.join(to), is_program)?;
    }
    put(&contents.program, &root.join("usr/bin/manyring"), true)?;
    pages(&contents.pages, &root)?;
    // The descriptors of vhost-user back-ends name these: the program goes by its name.
    fs::create_dir_all(root.join("usr/libexec/manyring")).context("usr/libexec")?;
    for name in ["vhost-user-blk", "vhost-user-net"] {
        let link = root.join("usr/libexec/manyring").join(name);
        symlink("../../bin/manyring", &link).context(link.display())?;
    }
    let licence = fs::read_to_string(source().join("LICENSE-MIT")).context("LICENSE-MIT")?;
    let mut copyright = fs::read_to_string(source().join(COPYRIGHT.0)).context("copyright")?;
    for line in licence.lines() {
        let _ = writeln!(copyright, " {}", if line.trim().is_empty() { "." } else { line });
    }
    fs::write(root.join(COPYRIGHT.1), copyright).context("copyright")?;
    let changelog = fs::read_to_string(root.join(CHANGELOG.1)).context("changelog")?;
    check(changelog.starts_with(&format!("manyring ({})", contents.version)), || {
        format!("{}: its first entry is not of version {}", CHANGELOG.0, contents.version)
    })?;
    let mut gzip = child("gzip");
    output(gzip.arg("-9n").args([CHANGELOG.1, NEWS.1].map(|name| root.join(name))))?;
    control(contents, &root)?;
    fs::create_dir_all(folder).context(folder.display())?;
    let deb = folder.join(format!("manyring_{}_{}.deb", contents.version, contents.architecture));
    let mut build = child("dpkg-deb");
    build
        .arg(format!("-Z{}", contents.compression))
        .args(["--root-owner-group", "--build"])
        .arg(&root)
        .arg(&deb);
    output(&mut build)?;
    Ok(deb)
}

/// Puts the files of `manyring pages` where Debian looks for them.
fn pages(pages: &Path, root: &Path) -> Outcome {
    const FILES: [(&str, &str); 4] = [
        ("bash/manyring.bash", "usr/share/bash-completion/completions/manyring"),
        ("zsh/_manyring", "usr/share/zsh/vendor-completions/_manyring"),
        ("fish/manyring.fish", "usr/share/fish/vendor_completions.d/manyring.fish"),
        ("openapi.json", "usr/share/doc/manyring/openapi.json"),
    ];
    for (from, to) in FILES {
        put(&pages.join(from), &root.join(to), false)?;
    }
    let man = pages.join("man");
    let mut gzip = child("gzip");
    gzip.arg("-9n");
    for page in fs::read_dir(&man).context(man.display())? {
        let page = page.context(man.display())?;
        let to = root.join("usr/share/man/man1").join(page.file_name());
        put(&page.path(), &to, false)?;
        gzip.arg(to);
    }
    output(&mut gzip).map(drop)
}

/// Copies a file, with the rights of a package's.
fn put(from: &Path, to: &Path, is_program: bool) -> Outcome {
    let folder = to.parent().ok_or("a file without a folder")?;
    fs::create_dir_all(folder).context(folder.display())?;
    fs::copy(from, to).context(from.display())?;
    let mode = if is_program { 0o755 } else { 0o644 };
    fs::set_permissions(to, Permissions::from_mode(mode)).context(to.display())
}

/// Writes what dpkg reads itself.
fn control(contents: &Contents, root: &Path) -> Outcome {
    let folder = root.join("DEBIAN");
    fs::create_dir_all(&folder).context("DEBIAN")?;
    let size = text(child("du").args(["-sk", "--exclude=DEBIAN"]).arg(root))?;
    let size = size.split_whitespace().next().unwrap_or("0").to_owned();
    let Contents { version, depends, architecture, .. } = contents;
    let depends = match depends.as_str() {
        "" => "systemd".to_owned(),
        libraries => format!("{libraries}, systemd"),
    };
    let fields = format!(
        "Package: manyring\nVersion: {version}\nArchitecture: {architecture}\n\
         Maintainer: The Manyring authors <manyring@packages.invalid>\n\
         Installed-Size: {size}\nDepends: {depends}\nSection: admin\nPriority: optional\n\
         Description: multi-queue I/O back-end for virtual machines\n \
         One daemon serves the network and block devices of many guests: over\n \
         vhost-user, and, for disks of Xen guests, over blkif.\n"
    );
    fs::write(folder.join("control"), fields).context("control")?;
    fs::write(folder.join("conffiles"), CONFIGURATION).context("conffiles")?;
    for script in ["postinst", "prerm", "postrm"] {
        put(&source().join("contrib/deb").join(script), &folder.join(script), true)?;
    }
    let mut sums = child("sh");
    sums.args(["-c", "find usr lib -type f -print0 | sort -z | xargs -0 md5sum"]);
    let sums = text(sums.current_dir(root))?;
    fs::write(folder.join("md5sums"), sums).context("md5sums")
}

/// The libraries that a program needs, as Debian names them.
///
/// # Errors
/// It cannot be told; the sentence says why.
pub fn depends(program: &Path, scratch: &Path) -> Outcome<String> {
    let folder = scratch.join("shlibs/debian");
    fs::create_dir_all(&folder).context(folder.display())?;
    let control = "Source: manyring\n\nPackage: manyring\nArchitecture: any\n";
    fs::write(folder.join("control"), control).context("control")?;
    let mut asked = child("dpkg-shlibdeps");
    asked.arg("-O").arg("-e").arg(program).current_dir(scratch.join("shlibs"));
    let told = text(&mut asked)?;
    let depends = told.trim().strip_prefix("shlibs:Depends=");
    check(depends.is_some(), || format!("dpkg-shlibdeps has said {told}"))?;
    Ok(depends.unwrap_or_default().to_owned())
}
