//! `GET /v1/openapi.json`: the routes that it names, the routes that there are, and those of the
//! documents are the same.

use crate::support::process::Daemon;
use crate::support::program::{http, shown};
use std::collections::BTreeSet;
use std::path::Path;

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\n[[blk]]\nname = 'blk0'\n\
    socket_path = '@/blk0'\nnull = '1M'\n[[limit]]\nname = 'gold'\niops = 10\n";

fn document(name: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(docs).unwrap()
}

/// The methods and paths that `document` has in backticks: `GET /v1/devices`, with parts in
/// capitals or braces as `{}`.
fn routes_in(document: &str) -> BTreeSet<String> {
    const METHODS: [&str; 5] = ["GET", "PUT", "POST", "PATCH", "DELETE"];
    let quoted = document.split('`').skip(1).step_by(2);
    let route = |text: &str| {
        let (method, path) = text.split_once(' ').filter(|(method, _)| METHODS.contains(method))?;
        let path = path.split(['?', '[', ' ', ',']).next()?;
        let part = |part: &str| match part {
            "" | "v1" => part.to_owned(),
            _ if part.starts_with('{') || part == part.to_uppercase() => "{}".to_owned(),
            _ => part.to_owned(),
        };
        let path: Vec<_> = path.split('/').map(part).collect();
        Some(format!("{method} {}", path.join("/")))
    };
    quoted.filter_map(route).collect()
}

#[test]
fn document_names_the_routes_that_there_are_and_those_that_are_promised() {
    let daemon = Daemon::run(CONFIG, &["control", "blk0"]);
    let control = daemon.socket_of("control");
    let openapi = shown(&control, "/v1/openapi.json");
    assert!(openapi["openapi"].as_str().unwrap().starts_with("3.1"), "{openapi}");
    let mut routes = BTreeSet::new();
    for (path, methods) in openapi["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["responses"]["500"].is_object(), "{method} {path}");
            let method = method.to_uppercase();
            routes.insert((method, path.clone()));
        }
    }
    let named: String =
        routes.iter().map(|(method, path)| format!("`{method} {path}`, ")).collect();
    let named = routes_in(&named);
    assert_eq!(named, routes_in(&document("design/0001-names.md")));
    let guide = routes_in(&document("guide/control.md"));
    assert!(guide.len() > 5 && guide.is_subset(&named), "{guide:?}");
    for (method, path) in routes {
        // Each route is found, whatever it answers to an empty body.
        let path = path.replace("{name}", "blk0").replace("{group}", "none");
        let (status, head, body) = http(&control, &method, &path, "{");
        assert!(!body.contains("no such"), "{method} {path}: {status} {head} {body}");
    }
}

#[test]
fn index_leads_to_everything_that_is_shown_without_a_name() {
    let daemon = Daemon::run(CONFIG, &["control", "blk0"]);
    let control = daemon.socket_of("control");
    let index = shown(&control, "/v1");
    assert_eq!(index["version"], env!("CARGO_PKG_VERSION"), "{index}");
    let links = index["links"].as_object().unwrap();
    let words: Vec<_> = links.keys().map(String::as_str).collect();
    let all =
        ["config", "devices", "events", "limits", "metrics", "openapi", "processes", "workers"];
    assert_eq!(words, all);
    for (word, path) in links {
        let (status, _, body) = http(&control, "GET", path.as_str().unwrap(), "");
        assert_eq!(status, 200, "{word}: {body}");
    }
    let openapi = shown(&control, "/v1/openapi.json");
    assert_eq!(openapi["info"]["version"], index["version"], "{openapi}");
}

#[test]
fn everything_that_is_refused_is_refused_in_json() {
    let daemon = Daemon::run(CONFIG, &["control", "blk0"]);
    let control = daemon.socket_of("control");
    let long = format!("{{\"size\": {}}}", "1".repeat(5000));
    for (method, path, body, status) in [
        ("GET", "/v1/devices/%ff", "", 400),
        ("DELETE", "/v1/devices/%ff", "", 400),
        ("DELETE", "/v1/devices/a?force=perhaps", "", 400),
        ("GET", "/v1/events?since=-1", "", 400),
        ("PUT", "/v1/devices/a", "[]", 400),
        ("PUT", "/v1/devices/a", "null", 400),
        ("PUT", "/v1/devices/a", "{\"kind\": \"blk\"", 400),
        ("PATCH", "/v1/devices/blk0", "[1]", 400),
        ("POST", "/v1/devices/blk0/resize", "[]", 400),
        ("POST", "/v1/devices/blk0/resize", long.as_str(), 413),
        ("POST", "/v1/devices/blk0/link", "{\"up\": true}", 422),
        ("PATCH", "/v1/devices/blk0", "{\"limit\": {\"read_ops\": null}}", 422),
        ("PUT", "/v1/limits/gold", "{\"iopses\": null}", 422),
        ("PUT", "/v1/limits/none", "{}", 404),
        ("POST", "/v1/devices", "{}", 405),
        ("GET", "/v2", "", 404),
    ] {
        let (answered, head, text) = http(&control, method, path, body);
        assert_eq!(answered, status, "{method} {path}: {text}");
        assert!(head.contains("content-type: application/json"), "{method} {path}: {head}");
        let error: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(error["error"].is_string(), "{text}");
        assert!(status != 405 || head.contains("allow: "), "{head}");
    }
}
