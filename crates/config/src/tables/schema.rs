//! OpenAPI schemas of values that the configuration takes as a string or as a number.

use super::{RawAccount, RawLimit, RawQueueLength, RawReceivePairs, RawSize};
use crate::limit_keys::limit_keys;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{OneOfBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

/// Returns the schema of a value that may have any of these types.
fn any_of(types: &[Type], about: &str) -> RefOr<Schema> {
    let types = SchemaType::Array(types.to_vec());
    ObjectBuilder::new().schema_type(types).description(Some(about)).into()
}

impl PartialSchema for RawAccount {
    fn schema() -> RefOr<Schema> {
        any_of(&[Type::String, Type::Integer], "A name or a number")
    }
}

impl ToSchema for RawAccount {}

impl PartialSchema for RawSize {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String);
        let bytes = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0usize));
        let about = "A size like \"64G\", or a number of bytes";
        OneOfBuilder::new()
            .item(text.pattern(Some("^[0-9]{1,15}[KMGT]?$")))
            .item(bytes.maximum(Some(1usize << 62)))
            .description(Some(about))
            .into()
    }
}

impl ToSchema for RawSize {}

impl PartialSchema for RawQueueLength {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String);
        let frames = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1usize));
        let about = "\"auto\", \"host\", or a number of frames";
        OneOfBuilder::new()
            .item(text.enum_values(Some(["auto", "host"])))
            .item(frames.maximum(Some(1_000_000usize)))
            .description(Some(about))
            .into()
    }
}

impl ToSchema for RawQueueLength {}

impl PartialSchema for RawReceivePairs {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String);
        let pairs = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1usize));
        OneOfBuilder::new()
            .item(text.enum_values(Some(["all", "auto"])))
            .item(pairs.maximum(Some(127usize)))
            .description(Some("\"all\", \"auto\", or a number of pairs"))
            .into()
    }
}

impl ToSchema for RawReceivePairs {}

impl PartialSchema for RawLimit {
    fn schema() -> RefOr<Schema> {
        let about = "The keys of a limit, as docs/guide/limits.md explains them";
        let types = [Type::Integer, Type::String, Type::Null];
        let value = || any_of(&types, "A number, also as a text; null or 0: none");
        let limit = ObjectBuilder::new().description(Some(about));
        let limit = limit_keys().fold(limit, |limit, key| limit.property(key, value()));
        limit.additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false))).into()
    }
}

impl ToSchema for RawLimit {}
