//! `Path`: the name of a xenstore node, and `Watched`: the subject of a watch.

/// Longest absolute path in bytes (`XENSTORE_ABS_PATH_MAX`).
pub const ABS_PATH_MAX: usize = 3072;
/// Longest relative path in bytes (`XENSTORE_REL_PATH_MAX`); that of a special watch as well.
pub const REL_PATH_MAX: usize = 2048;

/// Why bytes are no path of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum PathError {
    #[error("path is empty")]
    Empty,
    #[error("path of {size} bytes, {max} at most")]
    TooLong { size: usize, max: usize },
    #[error("path has the byte {byte:#04x} at {at}: letters, digits and - / _ @ are permitted")]
    Character { byte: u8, at: usize },
    #[error("path has an empty component at {at}")]
    EmptyComponent { at: usize },
    #[error("path ends with a slash")]
    TrailingSlash,
}

/// A path of a xenstore node. One that begins with `/` is absolute; any other is relative to the
/// sender's `/local/domain/<domid>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path<'a>(&'a str);

impl<'a> Path<'a> {
    /// The root of the tree.
    pub const ROOT: Path<'static> = Path("/");

    /// Parses a path.
    ///
    /// # Errors
    /// [`PathError`]: empty, too long, a character that is not permitted, a doubled or a trailing
    /// slash.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PathError> {
        let max = if bytes.first() == Some(&b'/') { ABS_PATH_MAX } else { REL_PATH_MAX };
        if bytes.is_empty() {
            return Err(PathError::Empty);
        }
        if bytes.len() > max {
            return Err(PathError::TooLong { size: bytes.len(), max });
        }
        let forbidden = |byte: &u8| !byte.is_ascii_alphanumeric() && !b"-/_@".contains(byte);
        if let Some(at) = bytes.iter().position(forbidden) {
            return Err(PathError::Character { byte: bytes[at], at });
        }
        if let Some(at) = bytes.windows(2).position(|two| two == b"//") {
            return Err(PathError::EmptyComponent { at });
        }
        if bytes.len() > 1 && bytes.last() == Some(&b'/') {
            return Err(PathError::TrailingSlash);
        }
        // Only ASCII is left, so that this cannot fail.
        std::str::from_utf8(bytes).map(Self).map_err(|e| {
            let at = e.valid_up_to();
            PathError::Character { byte: bytes[at], at }
        })
    }

    /// The path as text.
    #[must_use]
    pub const fn as_str(self) -> &'a str {
        self.0
    }

    /// True if the path begins at the root.
    #[must_use]
    pub fn is_absolute(self) -> bool {
        self.0.starts_with('/')
    }

    /// The components, from the root down.
    pub fn components(self) -> impl Iterator<Item = &'a str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// The last component; empty for the root.
    #[must_use]
    pub fn name(self) -> &'a str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The path of the node above; `None` above the root, and above a relative path of one
    /// component.
    #[must_use]
    pub fn parent(self) -> Option<Self> {
        match self.0.rfind('/') {
            Some(0) if self.0.len() > 1 => Some(Self("/")),
            Some(0) | None => None,
            Some(at) => Some(Self(&self.0[..at])),
        }
    }

    /// How many levels this node lies below `above`; 0 if both are the same node. `None` if it does
    /// not lie below. A watch on `above` reports changes of all nodes below it.
    #[must_use]
    pub fn depth_below(self, above: Path<'_>) -> Option<usize> {
        let rest = if above.0 == "/" && self.is_absolute() {
            self.0
        } else {
            self.0.strip_prefix(above.0)?
        };
        (rest.is_empty() || rest.starts_with('/')).then(|| Path(rest).components().count())
    }
}

impl std::fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// The subject of a watch and of its events: a node with everything below it, or a special event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Watched<'a> {
    /// A node and everything below it.
    Node(Path<'a>),
    /// An event that the server itself invents, such as `@releaseDomain`. The `@` is included.
    Special(&'a str),
}

impl<'a> Watched<'a> {
    /// A domain was introduced to the server.
    pub const INTRODUCE_DOMAIN: Watched<'static> = Watched::Special("@introduceDomain");
    /// A domain was released, shut down, crashed or destroyed.
    pub const RELEASE_DOMAIN: Watched<'static> = Watched::Special("@releaseDomain");

    /// Parses the subject of a watch.
    ///
    /// # Errors
    /// [`PathError`], as for a path. Behind the `@` of a special event, all printable characters
    /// are permitted.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PathError> {
        if bytes.first() != Some(&b'@') {
            return Path::parse(bytes).map(Self::Node);
        }
        if bytes.len() > REL_PATH_MAX {
            return Err(PathError::TooLong { size: bytes.len(), max: REL_PATH_MAX });
        }
        match bytes.iter().position(|byte| !byte.is_ascii_graphic()) {
            Some(at) => Err(PathError::Character { byte: bytes[at], at }),
            None => std::str::from_utf8(bytes)
                .map(Self::Special)
                .map_err(|e| PathError::Character { byte: b'@', at: e.valid_up_to() }),
        }
    }

    /// The watched path or event as text.
    #[must_use]
    pub const fn as_str(self) -> &'a str {
        match self {
            Self::Node(path) => path.as_str(),
            Self::Special(event) => event,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path<'_> {
        Path::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn path_with_forbidden_bytes_slashes_or_length_is_refused_with_the_place() {
        let refused = |bytes: &[u8]| Path::parse(bytes).unwrap_err();
        assert_eq!(refused(b""), PathError::Empty);
        assert_eq!(refused(b"/a b"), PathError::Character { byte: b' ', at: 2 });
        assert_eq!(refused(b"/a\0"), PathError::Character { byte: 0, at: 2 });
        assert_eq!(refused(b"/\xc3\xa4"), PathError::Character { byte: 0xc3, at: 1 });
        assert_eq!(refused(b"/a//b"), PathError::EmptyComponent { at: 2 });
        assert_eq!(refused(b"//"), PathError::EmptyComponent { at: 0 });
        assert_eq!(refused(b"/a/"), PathError::TrailingSlash);
        assert_eq!(refused(b"a/"), PathError::TrailingSlash);
        let long = |first: u8, size: usize| [vec![first], vec![b'x'; size - 1]].concat();
        assert!(Path::parse(&long(b'/', ABS_PATH_MAX)).is_ok());
        assert!(Path::parse(&long(b'x', REL_PATH_MAX)).is_ok());
        let (size, max) = (ABS_PATH_MAX + 1, ABS_PATH_MAX);
        assert_eq!(refused(&long(b'/', size)), PathError::TooLong { size, max });
        let (size, max) = (REL_PATH_MAX + 1, REL_PATH_MAX);
        assert_eq!(refused(&long(b'x', size)), PathError::TooLong { size, max });
    }

    #[test]
    fn path_knows_its_components_its_parent_and_its_name() {
        let disk = path("/local/domain/1/device");
        assert!(disk.is_absolute() && !path("device/vbd").is_absolute());
        assert_eq!(disk.components().collect::<Vec<_>>(), ["local", "domain", "1", "device"]);
        assert_eq!((disk.name(), disk.parent()), ("device", Some(path("/local/domain/1"))));
        assert_eq!(disk.to_string(), "/local/domain/1/device");
        assert_eq!(path("/local").parent(), Some(Path::ROOT));
        assert_eq!((Path::ROOT.parent(), Path::ROOT.name()), (None, ""));
        assert_eq!(path("device").parent(), None);
        assert_eq!(path("device/vbd").parent(), Some(path("device")));
    }

    #[test]
    fn depth_counts_whole_components_below_the_watched_node() {
        let depth = |below: &str, above: &str| path(below).depth_below(path(above));
        assert_eq!(depth("/a/b", "/a/b"), Some(0));
        assert_eq!(depth("/a/b/c/d", "/a/b"), Some(2));
        assert_eq!(depth("/a/bc", "/a/b"), None);
        assert_eq!(depth("/a", "/a/b"), None);
        assert_eq!(depth("/a/b", "/"), Some(2));
        assert_eq!(depth("/", "/"), Some(0));
        assert_eq!(depth("a/b", "/"), None);
        assert_eq!(depth("a/b", "a"), Some(1));
    }

    #[test]
    fn special_event_is_no_path_and_keeps_its_at_sign() {
        assert_eq!(Watched::parse(b"@releaseDomain"), Ok(Watched::RELEASE_DOMAIN));
        assert_eq!(Watched::parse(b"@releaseDomain/7"), Ok(Watched::Special("@releaseDomain/7")));
        assert_eq!(Watched::parse(b"/a"), Ok(Watched::Node(path("/a"))));
        assert_eq!(Watched::parse(b"@a\x7f"), Err(PathError::Character { byte: 0x7f, at: 2 }));
        let size = REL_PATH_MAX + 1;
        let long = [b"@".to_vec(), vec![b'x'; size - 1]].concat();
        assert!(Watched::parse(&long[1..]).is_ok() && Watched::parse(&long[..size - 1]).is_ok());
        assert_eq!(Watched::parse(&long), Err(PathError::TooLong { size, max: REL_PATH_MAX }));
    }
}
