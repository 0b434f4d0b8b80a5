//! The negotiation, pure: bytes that have come in, bytes that are to go out.
//!
//! ```text
//! loop: send the bytes that `take` has put out; receive `needs()` bytes; `take` them
//!       More: again   StartTls: both sides begin with TLS, and send and receive under it from
//!       then on; again   Done: transmission begins
//! ```

use super::{NbdError, u16_at, u32_at, u64_at};

const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// `NBD_FLAG_FIXED_NEWSTYLE`, of both sides.
const FIXED_NEWSTYLE: u16 = 1;
/// `NBD_FLAG_NO_ZEROES`, of both sides.
const NO_ZEROES: u16 = 1 << 1;

const OPT_STARTTLS: u32 = 5;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
const REP_ERR_POLICY: u32 = REP_ERROR | 2;
const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;
const REP_ERR_UNKNOWN: u32 = REP_ERROR | 6;
const REP_ERR_SHUTDOWN: u32 = REP_ERROR | 7;
const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR | 8;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const GREETING_SIZE: usize = 18;
const REPLY_HEADER_SIZE: usize = 20;
/// Most bytes of data in a reply; a string has up to 4096 (`doc/proto.md`, "Values").
const REPLY_DATA_MAX: usize = 8192;
/// Most replies to one option.
const REPLIES_MAX: u32 = 64;
/// Most bytes of the name of an export.
const NAME_MAX: usize = 4096;
/// Block sizes of a server that states none (`doc/proto.md`, "Block size constraints").
const BLOCKS: Blocks = Blocks { min: 1, preferred: 4096, max: 32 << 20 };

/// The export that a client asks the server for, and whether the connection is encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportRequest {
    /// The name of the export; empty: the server's default.
    pub name: String,
    /// The negotiation goes on under TLS.
    pub tls: bool,
}

/// Block sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The unit of offsets and lengths, a power of two.
    pub min: u32,
    /// The size of reads and writes that the server recommends, a power of two.
    pub preferred: u32,
    /// Most bytes of data that one command may have.
    pub max: u32,
}

/// The properties of the export that the server has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Block sizes of the export.
    pub blocks: Blocks,
    /// The server sends structured replies to reads.
    pub structured: bool,
}

/// Why an option was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionRefused {
    /// The server has no export of this name.
    #[error("has no export of this name")]
    Unknown,
    /// The server serves this client only under TLS.
    #[error("serves this export under TLS only (nbds://)")]
    TlsRequired,
    /// The server does not support TLS.
    #[error("speaks no TLS")]
    NoTls,
    /// The server does not support `NBD_OPT_GO`.
    #[error("is too old: it knows no NBD_OPT_GO")]
    NoGo,
    /// The server is shutting down.
    #[error("is shutting down")]
    Shutdown,
    /// The server's policy forbids the option to this client.
    #[error("refuses this client")]
    Policy,
    /// Another error, by its number.
    #[error("has refused the export with error {0}")]
    Other(u32),
}

/// What the negotiation needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed.
    More,
    /// Both sides begin with TLS now; the bytes that were put out are sent under it.
    StartTls,
    /// Transmission begins.
    Done(Export),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Header { option: u32 },
    Data { option: u32, kind: u32, len: usize },
    Ended,
}

/// A negotiation.
#[derive(Clone, Debug)]
pub struct Handshake {
    wish: ExportRequest,
    state: State,
    replies: u32,
    structured: bool,
    export: Option<(u64, u16)>,
    blocks: Blocks,
}

impl Handshake {
    /// A negotiation that has not begun.
    ///
    /// # Errors
    /// [`NbdError::Handshake`]: the name is longer than 4096 bytes.
    pub fn new(wish: ExportRequest) -> Result<Self, NbdError> {
        if wish.name.len() > NAME_MAX {
            return Err(NbdError::Handshake("the name of the export is too long"));
        }
        let state = State::Greeting;
        Ok(Self { wish, state, replies: 0, structured: false, export: None, blocks: BLOCKS })
    }

    /// How many bytes the next call of [`Self::take`] takes; 0 when the negotiation is over.
    #[must_use]
    pub fn needs(&self) -> usize {
        match self.state {
            State::Greeting => GREETING_SIZE,
            State::Header { .. } => REPLY_HEADER_SIZE,
            State::Data { len, .. } => len,
            State::Ended => 0,
        }
    }

    /// Takes the next bytes of the server; appends the answer to them to `out`.
    ///
    /// # Errors
    /// [`NbdError`]: the connection cannot be used any more.
    ///
    /// # Panics
    /// If `bytes` are more or fewer than [`Self::needs`] said.
    pub fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Progress, NbdError> {
        assert_eq!(bytes.len(), self.needs(), "as many bytes as were asked for");
        match self.state {
            State::Greeting => self.greeted(bytes, out),
            State::Header { option } => self.header(option, bytes, out),
            State::Data { option, kind, .. } => self.replied(option, kind, bytes, out),
            State::Ended => Err(NbdError::Handshake("more bytes after its end")),
        }
    }

    fn greeted(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Progress, NbdError> {
        if u64_at(bytes, 0) != NBDMAGIC {
            return Err(NbdError::NoServer);
        }
        let flags = u16_at(bytes, 16);
        if u64_at(bytes, 8) != IHAVEOPT || flags & FIXED_NEWSTYLE == 0 {
            return Err(NbdError::OldStyle);
        }
        out.extend(u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes());
        self.ask(if self.wish.tls { OPT_STARTTLS } else { OPT_STRUCTURED_REPLY }, out);
        Ok(Progress::More)
    }

    #[allow(clippy::cast_possible_truncation, reason = "a name has 4096 bytes at most")]
    fn ask(&mut self, option: u32, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        if option == OPT_GO {
            let name = self.wish.name.as_bytes();
            data.extend((name.len() as u32).to_be_bytes());
            data.extend(name);
            data.extend(1u16.to_be_bytes());
            data.extend(INFO_BLOCK_SIZE.to_be_bytes());
        }
        out.extend(IHAVEOPT.to_be_bytes());
        out.extend(option.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        self.replies = 0;
        self.state = State::Header { option };
    }

    fn header(
        &mut self,
        option: u32,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Progress, NbdError> {
        if u64_at(bytes, 0) != REPLY_MAGIC {
            return Err(NbdError::Handshake("no magic number"));
        }
        if u32_at(bytes, 8) != option {
            return Err(NbdError::Handshake("to an option that was not sent"));
        }
        self.replies += 1;
        if self.replies > REPLIES_MAX {
            return Err(NbdError::Handshake("too many replies"));
        }
        let (kind, len) = (u32_at(bytes, 12), u32_at(bytes, 16) as usize);
        if len > REPLY_DATA_MAX {
            return Err(NbdError::Handshake("a reply that is too long"));
        }
        if len > 0 {
            self.state = State::Data { option, kind, len };
            return Ok(Progress::More);
        }
        self.replied(option, kind, &[], out)
    }

    fn replied(
        &mut self,
        option: u32,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Progress, NbdError> {
        let is_error = kind & REP_ERROR != 0;
        match option {
            OPT_STARTTLS if kind == REP_ACK => {
                self.ask(OPT_STRUCTURED_REPLY, out);
                Ok(Progress::StartTls)
            }
            OPT_STARTTLS if is_error => Err(NbdError::Refused(OptionRefused::NoTls)),
            // A server without structured replies sends simple ones. A server that wants TLS first
            // says so again in the reply to `NBD_OPT_GO`.
            OPT_STRUCTURED_REPLY if kind == REP_ACK || is_error => {
                self.structured = !is_error;
                self.ask(OPT_GO, out);
                Ok(Progress::More)
            }
            OPT_GO if kind == REP_INFO => {
                self.state = State::Header { option };
                self.told(data).map(|()| Progress::More)
            }
            OPT_GO if kind == REP_ACK => self.agreed(),
            OPT_GO if is_error => Err(NbdError::Refused(refusal(kind))),
            _ => Err(NbdError::Handshake("a reply of an unknown kind")),
        }
    }

    fn told(&mut self, data: &[u8]) -> Result<(), NbdError> {
        if data.len() < 2 {
            return Err(NbdError::Handshake("information that is too short"));
        }
        match (u16_at(data, 0), data.len()) {
            (INFO_EXPORT, 12) => self.export = Some((u64_at(data, 2), u16_at(data, 10))),
            (INFO_BLOCK_SIZE, 14) => {
                let [min, preferred, max] = [2, 6, 10].map(|at| u32_at(data, at));
                // The rules of doc/proto.md, "Block size constraints".
                let are_sound = min.is_power_of_two()
                    && min <= 64 << 10
                    && preferred.is_power_of_two()
                    && preferred >= 512.max(min)
                    && max >= preferred;
                if !are_sound {
                    return Err(NbdError::Handshake("block sizes that cannot be"));
                }
                self.blocks = Blocks { min, preferred, max };
            }
            (INFO_EXPORT | INFO_BLOCK_SIZE, _) => {
                return Err(NbdError::Handshake("information of a wrong length"));
            }
            // Other information, such as the export's name and description: this client does not
            // use it.
            _ => {}
        }
        Ok(())
    }

    fn agreed(&mut self) -> Result<Progress, NbdError> {
        let (size, flags) = self.export.ok_or(NbdError::Handshake("an export without a size"))?;
        if flags & super::HAS_FLAGS == 0 {
            return Err(NbdError::Handshake("an export without flags"));
        }
        if size > i64::MAX.cast_unsigned() {
            return Err(NbdError::Handshake("a size that no disk has"));
        }
        self.state = State::Ended;
        let (blocks, structured) = (self.blocks, self.structured);
        Ok(Progress::Done(Export { size, flags, blocks, structured }))
    }
}

fn refusal(kind: u32) -> OptionRefused {
    match kind {
        REP_ERR_UNSUP => OptionRefused::NoGo,
        REP_ERR_POLICY => OptionRefused::Policy,
        REP_ERR_TLS_REQD => OptionRefused::TlsRequired,
        REP_ERR_UNKNOWN => OptionRefused::Unknown,
        REP_ERR_SHUTDOWN => OptionRefused::Shutdown,
        // The client asked for the block sizes in `NBD_OPT_GO`, so a sound server does not answer
        // with this error.
        REP_ERR_BLOCK_SIZE_REQD => OptionRefused::Other(8),
        other => OptionRefused::Other(other & !REP_ERROR),
    }
}
