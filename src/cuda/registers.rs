//! PTX with each register and label named by how many of its kind are newer, instead of by its number: what is unrolled repeats
//! itself then, and packed texts are a ninth smaller. The build script writes it so, before it packs; the crate reads it.

/// `%r7` becomes `%r-1` where the newest before it was `%r8`, and `%r+1` where that was `%r6`; so does the last number of `$L__BB0_7`.
#[allow(dead_code)] // but in the build script and tests
pub(crate) fn to_relative(ptx: &str) -> String {
    renumbered(ptx, |number, newest| {
        let number: u32 = number.parse().ok()?;
        let (sign, distance) = if number > newest { ('+', number - newest) } else { ('-', newest - number) };
        Some((number, format!("{sign}{distance}")))
    })
}

/// The same back.
pub(crate) fn to_absolute(text: &str) -> String {
    renumbered(text, |number, newest| {
        let (sign, distance) = number.split_at_checked(1)?;
        let distance = distance.parse().ok()?;
        let number = if sign == "+" { newest.checked_add(distance) } else { newest.checked_sub(distance) }?;
        Some((number, number.to_string()))
    })
}

/// With each number as `renumber` writes it, given how it is written and the highest of its kind before it. It answers the number,
/// too, or `None` where there is none, as in the names of special registers.
fn renumbered(text: &str, renumber: impl Fn(&str, u32) -> Option<(u32, String)>) -> String {
    let end_of = |text: &str, is_part: fn(char) -> bool| text.find(|c| !is_part(c)).unwrap_or(text.len());
    let mut newest: Vec<(&str, u32)> = vec![];
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['%', '$']) {
        let (before, named) = rest.split_at(at + 1);
        let end_of_kind = if before.ends_with('%') {
            end_of(named, |c| c.is_ascii_lowercase())
        } else {
            let label = &named[..end_of(named, |c| c.is_ascii_alphanumeric() || c == '_')];
            label.rfind('_').map_or(0, |last| last + 1)
        };
        let (kind, behind) = named.split_at(end_of_kind);
        let sign = behind.starts_with(['+', '-']) as usize;
        let (number, behind) = behind.split_at(sign + end_of(&behind[sign..], |c| c.is_ascii_digit()));
        let at = newest.iter().position(|of| of.0 == kind).unwrap_or_else(|| {
            newest.push((kind, 0));
            newest.len() - 1
        });
        out.extend([before, kind]);
        match renumber(number, newest[at].1) {
            Some((found, written)) => {
                newest[at].1 = newest[at].1.max(found);
                out.push_str(&written);
            }
            None => out.push_str(number),
        }
        rest = behind;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let ptx =
            ".reg .b32 %r<9>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r3,%r1,%r2;\nld.f32 %f1,[%rd59+204];\n@%p2 bra $L__BB0_9;\nbra $L;\n$L__BB0_8:\n%";
        let relative = ".reg .b32 %r<9>;\nmov.u32 %r+1,%tid.x;\nadd.s32 %r+2,%r-2,%r-1;\nld.f32 %f+1,[%rd+59+204];\n@%p+2 bra $L__BB0_+9;\nbra $L;\n$L__BB0_-1:\n%";
        assert_eq!(to_relative(ptx), relative);
        assert_eq!(to_absolute(relative), ptx);
    }
}
