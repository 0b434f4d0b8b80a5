//! A disk of a server that keeps its word, and of many that do not.

mod bench;
mod hostile;
mod lost;
mod requests;
mod server;
mod shared;
mod tls;
