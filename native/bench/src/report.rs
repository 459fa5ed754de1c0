//! Percentiles and JSON of figures.

/// The value that `percent` of the samples do not exceed (nearest rank).
pub fn percentile(sorted: &[u64], percent: usize) -> u64 {
    match sorted.len() {
        0 => 0,
        n => sorted[(n * percent).div_ceil(100).clamp(1, n) - 1],
    }
}

/// One JSON object of numbers; names need no escaping.
pub fn json(fields: &[(String, f64)]) -> String {
    let items: Vec<String> = fields
        .iter()
        .map(|(name, value)| format!("\"{name}\": {}", number(*value)))
        .collect();
    format!("{{{}}}", items.join(", "))
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let sorted: Vec<u64> = (1..=10).collect();
        assert_eq!(
            [10, 50, 90, 100].map(|p| percentile(&sorted, p)),
            [1, 5, 9, 10]
        );
        assert_eq!((percentile(&[], 50), percentile(&[7], 10)), (0, 7));
    }

    #[test]
    fn objects_are_json() {
        assert_eq!(
            json(&[("n".into(), 3.0), ("rate".into(), 1.5)]),
            r#"{"n": 3, "rate": 1.50}"#
        );
    }
}
