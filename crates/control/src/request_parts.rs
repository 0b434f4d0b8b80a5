//! Extracts name, query and body of a request for the handlers. In place of axum's own extractors,
//! which answer errors in plain text: these answer with a [`Refusal`], as the whole API does.

use crate::refusal::Refusal;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use manyring_config::SIZE_MAX;
use manyring_supervisor::model::Keys;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The longest body that is read, in bytes. Only `PUT /v1/config` takes a longer one.
pub(super) const BODY_SIZE_MAX: usize = 4096;

/// The name of a device or a group, from the path.
#[derive(Debug)]
pub(super) struct Name(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let name = Path::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|error| Refusal::new(error.status(), error.body_text()))?;
        Ok(Self(name))
    }
}

/// The query of a request: the part of its address behind the question mark.
#[derive(Debug)]
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let asked = Query::from_request_parts(parts, state).await;
        let Query(asked) = asked.map_err(|error| bad(error.body_text()))?;
        Ok(Self(asked))
    }
}

/// The whole body of a request. The header `content-type` is ignored: `curl -d` sends JSON as
/// `application/x-www-form-urlencoded`.
#[derive(Debug)]
pub(super) struct Body(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let body = Bytes::from_request(request, state).await;
        body.map(Self).map_err(|error| {
            let status = error.status();
            let problem = match status {
                StatusCode::PAYLOAD_TOO_LARGE => format!(
                    "body: is too long: a configuration has {SIZE_MAX} bytes at most, any other \
                     body {BODY_SIZE_MAX}"
                ),
                _ => error.body_text(),
            };
            Refusal::new(status, problem)
        })
    }
}

impl Body {
    /// Parses the body as a JSON object.
    pub(super) fn keys(&self) -> Result<Keys, Refusal> {
        let keys: Option<Keys> = self.read()?;
        keys.ok_or_else(|| bad("body: is null, not an object".to_owned()))
    }

    /// Parses the body into `T`; an empty body, and `null`, are an object without keys. The body is
    /// read as a JSON object first, because serde would also accept a list for a struct.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T, Refusal> {
        let keys = if self.0.is_empty() { None } else { self.read()? };
        let keys = Value::Object(keys.unwrap_or_default());
        serde_json::from_value(keys).map_err(|error| bad(format!("body: {error}")))
    }

    fn read(&self) -> Result<Option<Keys>, Refusal> {
        let keys: Result<Option<Keys>, _> = serde_json::from_slice(&self.0);
        let mut keys = keys.map_err(|error| bad(format!("body: {error}")))?;
        keys.iter_mut().flat_map(Keys::values_mut).for_each(make_whole);
        Ok(keys)
    }
}

/// Turns 1500.0 into 1500, at any depth: some programs write whole numbers as floats.
fn make_whole(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().filter(|float| float.fract() == 0.0);
            let whole = float.and_then(|float| format!("{float:.0}").parse().ok());
            *number = whole.unwrap_or_else(|| number.clone());
        }
        Value::Array(values) => values.iter_mut().for_each(make_whole),
        Value::Object(keys) => keys.values_mut().for_each(make_whole),
        _ => {}
    }
}

/// The refusal of a request that cannot be parsed, with status 400.
pub(super) fn bad(error: String) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn body_is_an_object_or_nothing_and_whole_numbers_are_whole() {
        let body = |text: &'static str| Body(Bytes::from_static(text.as_bytes()));
        let keys = body(r#"{"a": 1500.0, "b": [2.0, 2.5], "c": {"d": -1e3}, "e": 1e300}"#).keys();
        let expected = json!({"a": 1500, "b": [2, 2.5], "c": {"d": -1000}, "e": 1e300});
        let Value::Object(expected) = expected else { unreachable!("it is written so") };
        let keys = keys.unwrap();
        assert_eq!(
            ["a", "b", "c"].map(|key| &keys[key]),
            ["a", "b", "c"].map(|key| &expected[key])
        );
        assert_eq!(keys["e"].as_f64(), Some(1e300));
        for text in ["", "null", "{}"] {
            assert!(body(text).parse::<Keys>().unwrap().is_empty(), "{text:?}");
        }
        for text in ["", "null", "[]", "[1]", "7", "{", "\u{0}"] {
            assert!(body(text).keys().is_err(), "{text:?}");
        }
        assert!(body("[]").parse::<Keys>().is_err());
    }
}
