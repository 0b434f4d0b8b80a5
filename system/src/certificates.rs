//! Certificates of a test authority, in a folder, under the names by which QEMU, nbdkit and
//! Manyring look for them.

use crate::{Context, Outcome};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use std::path::Path;

/// The name in the server's certificate.
pub(crate) const HOST: &str = "storage.example";

/// Puts `ca-cert.pem`, and certificates and keys of a server and a client, into `folder`.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn write(folder: &Path) -> Outcome {
    let put = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).context(path.display())
    };
    let key = KeyPair::generate().context("a key")?;
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, folder.display().to_string());
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    put("ca-cert.pem", authority.self_signed(&key).context("an authority")?.pem())?;
    let issuer = Issuer::new(authority, key);
    for (name, usage) in [
        ("server", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let key = KeyPair::generate().context("a key")?;
        let mut params = CertificateParams::new(vec![HOST.to_owned()]).context(HOST)?;
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &issuer).context("a certificate")?;
        put(&format!("{name}-cert.pem"), certificate.pem())?;
        put(&format!("{name}-key.pem"), key.serialize_pem())?;
    }
    Ok(())
}
