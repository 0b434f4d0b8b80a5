//! `GET /v1/openapi.json`: what can be asked, as a program reads it. It is made of the handlers and
//! their types; here is what all of them have in common. `GET /v1`: where a reader begins.

use super::api;
use super::refusal::Problem;
use crate::config::plan::{Class, class_of};
use crate::config::raw::{RawBlk, RawNet};
use axum::Json;
use axum::http::header;
use axum::response::IntoResponse;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::schema::{AnyOfBuilder, Object, ObjectBuilder, Type};
use utoipa::openapi::{ContentBuilder, OneOfBuilder, OpenApi, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The frame of the document.
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

/// The document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    responses((status = 200, body = BTreeMap<String, Value>, description = "This document")),
)]
pub(super) async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], text())
}

/// The document as JSON; written once.
pub(crate) fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let (_, mut document) = api::routes().split_for_parts();
        complete(&mut document);
        serde_json::to_string(&document).unwrap_or_default()
    })
}

/// `GET /v1`
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct Index {
    /// The version of the daemon.
    version: &'static str,
    /// The path of everything that is shown without a name, by the last word of the path.
    links: BTreeMap<String, String>,
}

/// Which version this is, and what can be looked at.
#[utoipa::path(
    get,
    path = "/v1",
    responses((status = 200, body = Index, description = "Where to look on")),
)]
pub(super) async fn index() -> Json<Index> {
    static INDEX: OnceLock<Index> = OnceLock::new();
    let index = INDEX.get_or_init(|| {
        let (_, document) = api::routes().split_for_parts();
        let shown = document.paths.paths.into_iter().filter(|(_, item)| item.get.is_some());
        let links = shown.filter_map(|(path, _)| Some((link(&path)?.to_owned(), path)));
        Index { version: env!("CARGO_PKG_VERSION"), links: links.collect() }
    });
    Json(index.clone())
}

/// The name under which the index lists a path. `None`: it lists neither itself nor paths that hold
/// the name of a device.
fn link(path: &str) -> Option<&str> {
    let (_, last) = path.rsplit_once('/').filter(|_| path != "/v1" && !path.contains('{'))?;
    last.split('.').next()
}

/// The keys of a device: those of its table, and which table it is.
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

/// The live keys of a device.
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

/// Adds what every handler can answer, which none of them says for itself.
fn complete(document: &mut OpenApi) {
    for item in document.paths.paths.values_mut() {
        let changes = [&mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in changes.into_iter().flatten() {
            answer(operation, 403, "Not at this socket, or not for this user");
            if operation.request_body.is_some() {
                answer(operation, 413, "The body is too long");
            }
            operation.parameters.iter_mut().flatten().for_each(is_no_null);
            may_fail(operation);
        }
        item.get.iter_mut().for_each(may_fail);
    }
    // A device that is not served has no details: what describes those describes it as well.
    if let Some(components) = &mut document.components
        && let Some(RefOr::T(Schema::OneOf(details))) = components.schemas.get_mut("Detail")
    {
        let any = details.items.drain(..).fold(AnyOfBuilder::new(), AnyOfBuilder::item);
        components.schemas.insert("Detail".to_owned(), any.into());
    }
}

/// A header that is optional is left out: it cannot be null.
fn is_no_null(parameter: &mut RefOr<Parameter>) {
    if let RefOr::T(Parameter { parameter_in: ParameterIn::Header, schema, .. }) = parameter
        && let Some(RefOr::T(Schema::Object(schema))) = schema
    {
        schema.schema_type = Type::String.into();
    }
}

fn may_fail(operation: &mut Operation) {
    answer(operation, 400, "The path, what stands behind it, or the body is not understood");
    answer(operation, 500, "The host refuses, or the daemon has failed");
    answer(operation, 503, "Too many clients, or changes: ask again");
}

fn answer(operation: &mut Operation, status: u16, about: &str) {
    let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    let answer = ResponseBuilder::new().description(about).content("application/json", problem);
    let kept = &mut operation.responses.responses;
    kept.entry(status.to_string()).or_insert_with(|| answer.build().into());
}
