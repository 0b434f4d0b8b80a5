//! `GET /v1/openapi.json`: the API's description for programs. utoipa derives it from the handlers
//! and their types; this file adds the parts that all handlers have in common.

use crate::refusal::Problem;
use manyring_config::plan::{Class, class_of};
use manyring_config::tables::{RawBlk, RawNet};
use serde_json::json;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::schema::{AnyOfBuilder, Object, ObjectBuilder, Type};
use utoipa::openapi::{ContentBuilder, OneOfBuilder, OpenApi, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The part of the document that belongs to no handler: title, license, server.
#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Manyring's control socket",
        description = "HTTP over a unix socket. docs/guide/control.md of the source explains it.",
        license(name = "Apache-2.0 OR MIT", identifier = "Apache-2.0 OR MIT"),
    ),
    servers((url = "/", description = "The control socket")),
    components(schemas(Problem)),
)]
pub(super) struct Document;

/// The schema of a device: the keys of its table, and `kind`, which names the table.
#[derive(Debug)]
pub(super) struct DeviceKeys;

impl PartialSchema for DeviceKeys {
    fn schema() -> RefOr<Schema> {
        let device = json!({"kind": "blk", "socket_path": "/run/manyring/a", "memory": "64M"});
        OneOfBuilder::new()
            .item(table::<RawBlk>("blk"))
            .item(table::<RawNet>("net"))
            .examples([device])
            .into()
    }
}

impl ToSchema for DeviceKeys {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        RawBlk::schemas(schemas);
        RawNet::schemas(schemas);
    }
}

/// The schema of a `PATCH`: the live keys of a device.
#[derive(Debug)]
pub(super) struct LiveKeys;

impl PartialSchema for LiveKeys {
    fn schema() -> RefOr<Schema> {
        let mut keys = object(RawNet::schema());
        keys.properties.retain(|key, _| class_of(key) == Some(Class::Live));
        keys.examples = vec![json!({"mtu": 1500})];
        Schema::Object(keys).into()
    }
}

impl ToSchema for LiveKeys {}

fn object(schema: RefOr<Schema>) -> Object {
    match schema {
        RefOr::T(Schema::Object(object)) => object,
        _ => Object::default(),
    }
}

fn table<T: PartialSchema>(kind: &str) -> RefOr<Schema> {
    let mut table = object(T::schema());
    let kind = ObjectBuilder::new().schema_type(Type::String).enum_values(Some([kind]));
    table.properties.insert("kind".to_owned(), kind.into());
    table.required.push("kind".to_owned());
    Schema::Object(table).into()
}

/// Adds the error answers that every handler can give: no handler lists them itself.
pub(super) fn complete(document: &mut OpenApi) {
    for item in document.paths.paths.values_mut() {
        let changes = [&mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in changes.into_iter().flatten() {
            answer(operation, 403, "This socket is read-only, or the user may not do this");
            if operation.request_body.is_some() {
                answer(operation, 413, "The body is too long");
            }
            operation.parameters.iter_mut().flatten().for_each(is_no_null);
            may_fail(operation);
        }
        item.get.iter_mut().for_each(may_fail);
    }
    // `Detail` of a device that waits is an empty object, which matches several variants of the
    // enum. `oneOf` would reject that, so the document says `anyOf`.
    if let Some(components) = &mut document.components
        && let Some(RefOr::T(Schema::OneOf(details))) = components.schemas.get_mut("Detail")
    {
        let any = details.items.drain(..).fold(AnyOfBuilder::new(), AnyOfBuilder::item);
        components.schemas.insert("Detail".to_owned(), any.into());
    }
}

/// Removes the type `null` from an optional header: utoipa adds it, but a header cannot be null.
fn is_no_null(parameter: &mut RefOr<Parameter>) {
    if let RefOr::T(Parameter { parameter_in: ParameterIn::Header, schema, .. }) = parameter
        && let Some(RefOr::T(Schema::Object(schema))) = schema
    {
        schema.schema_type = Type::String.into();
    }
}

fn may_fail(operation: &mut Operation) {
    answer(operation, 400, "The path, the query or the body cannot be parsed");
    answer(operation, 500, "A system call failed or timed out, or the daemon has a bug");
    answer(operation, 503, "Too many clients or changes: send the request again");
}

fn answer(operation: &mut Operation, status: u16, about: &str) {
    let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    let answer = ResponseBuilder::new().description(about).content("application/json", problem);
    let kept = &mut operation.responses.responses;
    kept.entry(status.to_string()).or_insert_with(|| answer.build().into());
}
